"""Measurements of one step, and of collectives."""
