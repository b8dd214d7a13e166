"""Execution of runs: processes, their environment, their folders, their progress."""
