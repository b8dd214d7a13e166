"""The operating system: files, signals, processes, memory and exit codes."""
