"""The memory of ZeRO: flat buffers of parameters and gradients, and the units that share them."""
