"""What both sides must compute alike, in NumPy: weights, batches, dropout, optimizer and shards."""
