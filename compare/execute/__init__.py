"""How a run is executed: processes, their environment, their folders, their progress."""
