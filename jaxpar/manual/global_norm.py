"""The norm over all gradients when each device holds some of them: every element counts once."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import collectives
from jaxpar.placement import SHARD, TP, Placement


def split_axes(p: Placement) -> tuple[str, ...]:
    """The mesh axes whose devices hold different parts of a leaf; along the others it is repeated."""
    return tuple(axis for axis, dim in ((SHARD, p.shard_dim), (TP, p.tp_dim)) if dim is not None)


def global_norm(gradients: Any, placements: Any) -> jax.Array:
    """Euclidean norm over all leaves of all devices, equal on all; one psum for each way of being split.

    Args:
        gradients: this device's parts, synchronised.
        placements: like `gradients`.
    """
    squares: dict[tuple[str, ...], list[jax.Array]] = {}
    for p, g in zip(jax.tree.leaves(placements), jax.tree.leaves(gradients), strict=True):
        squares.setdefault(split_axes(p), []).append(jnp.sum(jnp.square(g)))
    totals = {axes: jnp.stack(local).sum() for axes, local in squares.items()}
    reduced = [collectives.all_reduce(total, axes) if axes else total for axes, total in totals.items()]
    return jnp.sqrt(jnp.stack(reduced).sum())
