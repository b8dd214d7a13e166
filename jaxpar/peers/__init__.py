"""Peers: loops as users of JAX write them, to be timed and compared beside our engines."""

import importlib
from collections.abc import Callable

from compare.spec.engines.registry import JAX

MODULES = {peer.name: f"jaxpar.{peer.folder}" for peer in JAX.peers}


def load_train(engine: str) -> Callable[..., None]:
    """The `train` of an engine: a peer's own, or the common loop, called alike."""
    return importlib.import_module(MODULES.get(engine, "jaxpar.train")).train
