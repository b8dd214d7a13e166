"""Hooks on parameters that keep nobody alive.

Autograd holds hooks out of the garbage collector's sight: one that held its owner, who holds the parameter,
would keep both for ever. An owner that is gone wants no gradients.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchpar.comm.untraced import untraced


def weakly(method: Callable[..., Any], *whom: object) -> Callable[[torch.Tensor], None]:
    """A tensor hook that drops its gradient, any shape, and calls `method(*whom)` while owner and whom live.

    Args:
        method: bound.
        whom: objects that can be referred to weakly, or numbers.
    """
    own = weakref.WeakMethod(method)
    others = [(lambda one=one: one) if isinstance(one, int) else weakref.ref(one) for one in whom]

    @untraced
    def hook(tensor: torch.Tensor) -> None:
        if call := own():
            call(*(other() for other in others))

    return hook
