"""Studies: a file each, and what they share: presets, fitting engines, checkpoints to go on from."""
