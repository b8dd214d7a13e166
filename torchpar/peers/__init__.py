"""Peers: the training step as users of PyTorch write it, for comparison."""
