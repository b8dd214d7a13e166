"""What is true: the ladder, its tolerances, what a run cost, closed forms."""
