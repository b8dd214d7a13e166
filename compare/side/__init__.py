"""Code that a side's process runs: its command line, its place among processes, its supervisor, its
record."""
