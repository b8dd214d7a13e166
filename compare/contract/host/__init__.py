"""What both sides and the harness need of the machine: files, locks, signals, exits."""
