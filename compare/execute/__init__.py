"""Processes of the harness: start, watch and end engines, on one or several hosts."""
