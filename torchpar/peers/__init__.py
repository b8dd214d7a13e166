"""Peers: a loop each, as users of PyTorch and of DeepSpeed write it, to be timed and compared beside ours."""

import importlib
from collections.abc import Callable

from compare.spec.engines.registry import TORCH

MODULES = {peer.name: f"torchpar.{peer.folder}" for peer in TORCH.peers}


def load_train(engine: str) -> Callable[..., None]:
    """The `train` of an engine: a peer's own, or the common loop, called alike.

    A peer is imported only here: what it needs may not be installed.
    """
    return importlib.import_module(MODULES.get(engine, "torchpar.train")).train
