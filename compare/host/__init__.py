"""The machine: processors, files, disks, signals and exit codes."""
