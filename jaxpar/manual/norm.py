"""The norm over all gradients when each device holds some of them: every element counts once."""

from typing import Any

import jax
import jax.numpy as jnp

from compare.contract.communication import NORM
from jaxpar.comm import collectives
from jaxpar.placement import split_axes


def global_norm(gradients: Any, placements: Any) -> jax.Array:
    """Euclidean norm over all leaves of all devices, a scalar, equal on all; one psum for each set of axes.

    Args:
        gradients: this device's shards, synchronised: leaves of any shape.
        placements: a tree like `gradients`: which axes split each leaf.
    """
    squares: dict[tuple[str, ...], list[jax.Array]] = {}
    for p, g in zip(jax.tree.leaves(placements), jax.tree.leaves(gradients), strict=True):
        squares.setdefault(split_axes(p), []).append(jnp.sum(jnp.square(g)))
    totals = {axes: jnp.stack(local).sum() for axes, local in squares.items()}
    whole = [
        collectives.all_reduce(total, axes, purpose=NORM) if axes else total for axes, total in totals.items()
    ]
    return jnp.sqrt(jnp.stack(whole).sum())
