"""Peers: a step each, as users of PyTorch and of DeepSpeed write it, to be timed and compared beside ours."""
