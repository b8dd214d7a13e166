"""Recomputing activations in backward, so that forward need not keep them."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from compare.contract.experiment import Layout

Remat = Literal["none", "dots", "full"]

# What forward may keep of a layer; the rest is computed again.
POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def resolve_remat(layout: Layout) -> Remat:
    """`layout.remat`, with auto resolved: dots is fastest under XLA's scan, and smaller than none."""
    return "dots" if layout.remat == "auto" else layout.remat


def apply_remat(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A scanned layer that keeps of its forward pass what `remat` allows."""
    if remat == "none":
        return layer
    # A scan compiles its body apart from its backward: nothing has to be kept from merging the two (CSE).
    return jax.checkpoint(layer, policy=POLICIES[remat], prevent_cse=False)
