"""Measurements of a run: communication, memory, time."""
