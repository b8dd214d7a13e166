"""Studies: paired runs, presets, faults, the matrix, nanoGPT's golden numbers."""
