"""Helpers of the pipeline by hand: one stage, and the table of ticks."""
