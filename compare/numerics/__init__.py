"""Numerics that both sides share, in NumPy: weights, batches, dropout, optimizer and shards."""
