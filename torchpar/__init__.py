"""torchpar: the PyTorch side. `python -m torchpar RUN_DIR` runs torch-manual and torch-library."""
