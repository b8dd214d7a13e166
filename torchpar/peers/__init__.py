"""Peers: a step each, as users of PyTorch write it, to be timed and compared beside ours."""
