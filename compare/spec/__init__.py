"""What an experiment is: its sections, mesh axes and engines."""
