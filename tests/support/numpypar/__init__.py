"""A third side in plain NumPy: what it takes to join the harness, and a proof that nothing else does."""
