"""What a step communicates and holds."""
