"""Runtime of a side: arguments, process places, recording, locks, and word from other hosts."""
