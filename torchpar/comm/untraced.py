"""Functions that torch.compile leaves alone: hooks, and all that moves data between ranks.

Dynamo would trace a hook into the graph of the layer that it hangs on: the collectives, and storages that
come and go. Instead it breaks the graph there. What is left for it are the forwards of the layers in
between, each a graph of its own, as under PyTorch's FSDP2.
"""

from functools import partial

import torch

untraced = partial(torch.compiler.disable, reason="torchpar's hooks and collectives")
