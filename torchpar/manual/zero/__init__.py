"""The memory and order of ZeRO: flat buffers, units, who is unsharded when."""
