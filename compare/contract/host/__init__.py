"""The machine, for both sides and the harness: files, locks, signals, exits."""
