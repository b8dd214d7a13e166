"""Peers: plain training loops of JAX, for comparison with the engines."""
