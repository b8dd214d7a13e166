"""Peers: loops as users of JAX write them, to be timed and compared beside our engines."""
