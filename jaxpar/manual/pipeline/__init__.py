"""What the pipeline by hand is made of: one stage, and the table of ticks."""
