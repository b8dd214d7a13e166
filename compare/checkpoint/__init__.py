"""Checkpoints: the full state of a training, in files that every engine on every layout reads."""
