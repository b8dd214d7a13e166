"""Collectives of jax-manual, along a mesh axis: thin names over `jax.lax`, which can be swapped at once.

Each has its purpose in a named scope, which the ledger reads.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from compare.contract.communication import ROUTING

# XLA merges small all-reduces into one (the combiner), which is not what a hand-written schedule asked for.
# On a CPU (jax 0.10.2) 5 psums became 1, also behind lax.optimization_barrier; with this option there are 5.
KEEP_COLLECTIVES_APART = {
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner,gpu-all-reduce-combiner,all-reduce-combiner"
}

# The check of varying axes stays on: without it JAX transposes psum differently, and gradients come out too
# large by the size of the axis while the loss is right.
per_device: Callable[..., Any] = partial(jax.shard_map, check_vma=True)


def ledger_scope(purpose: str, *, by_hand: bool = False) -> AbstractContextManager:
    """A scope that gives the ledger the purpose of its collectives (`contract.communication`).

    A collective in a backward `by_hand` has this purpose, and not that of its derivative.
    """
    name = f"for_{purpose.replace(' ', '_')}" + "_by_hand" * by_hand
    return jax.named_scope(name) if purpose else nullcontext()


def turns_scope(turns: Sequence[int], *, of: int) -> AbstractContextManager:
    """A scope that gives the ledger the turns, of a loop around it, at which it is entered, by rank of pp."""
    return jax.named_scope(f"runs_{'_'.join(map(str, turns))}_of_{of}")


axis_size = lax.axis_size
Axes = str | tuple[str, ...]
"""One mesh axis, or several as one, the first outermost."""


def all_reduce(x: jax.Array, axis: Axes, *, purpose: str = "") -> jax.Array:
    """Sum of x, any shape, over one or several mesh axes, on every device of them."""
    # A sum over one device is nothing, and XLA on a CPU copies all of x for it.
    names = (axis,) if isinstance(axis, str) else axis
    axes = [name for name in names if axis_size(name) > 1 or name in jax.typeof(x).mat.varying]
    with ledger_scope(purpose):
        return lax.psum(x, tuple(axes)) if axes else x


def all_reduce_max(x: jax.Array, axis: str, *, purpose: str = "") -> jax.Array:
    """Maximum of x, any shape, over a mesh axis, on every device of it. Not differentiable."""
    with ledger_scope(purpose):
        return lax.pmax(x, axis)


def to_varying(tree: Any, axis: str | Sequence[str], *, purpose: str = "") -> Any:
    """Mark values that are equal along an axis, or several, as each device's own. Its transpose: all-reduce.

    Autodiff sums the gradient of an equal value where varying data use it; that of a marked one stays local.
    """
    axes = tuple(a for a in ((axis,) if isinstance(axis, str) else axis) if axis_size(a) > 1)
    if not axes:
        return tree
    with ledger_scope(purpose):
        return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), tree)


def all_gather(x: jax.Array, axis: Axes, *, dim: int, purpose: str = "", is_equal: bool = False) -> jax.Array:
    """Shards joined at `dim`, (.., d, ..) -> (.., n d, ..), n devices. Its transpose: `reduce_scatter`.

    `is_equal` marks it as equal on all devices: for updated parameters.
    """
    with ledger_scope(purpose):
        return lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying" if is_equal else "varying")


def reduce_scatter(x: jax.Array, axis: Axes, *, dim: int, purpose: str = "") -> jax.Array:
    """This device's shard at `dim` of the sum over a mesh axis: (.., d, ..) -> (.., d / n, ..)."""
    with ledger_scope(purpose):
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: jax.Array, axis: Axes, *, split: int, joined: int, purpose: str = "") -> jax.Array:
    """Each device's part of one dim for all of another: (.., s, .., j, ..) -> (.., s / n, .., n j, ..)."""
    with ledger_scope(purpose):
        return lax.all_to_all(x, axis, split_axis=split, concat_axis=joined, tiled=True)


def own_shard(x: jax.Array, axis: Axes, *, dim: int) -> jax.Array:
    """This device's shard of a full array, (.., d, ..) -> (.., d / n, ..) at `dim`, without communication."""
    size = x.shape[dim] // axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


def own_places(count: int, axis: Axes, *, of: Callable[[int], Any]) -> jax.Array:
    """The numbers of this device's `count` heads or positions: its shard of those `of` all along the axis."""
    return own_shard(jnp.asarray(of(count * axis_size(axis))), axis, dim=0)


def shift(x: jax.Array, axis: Axes, *, by: int = 1, purpose: str = "") -> jax.Array:
    """The x, any shape, of the device `by` positions further along a mesh axis, a ring.

    Autodiff does not see it: callers write its backward by hand.
    """
    n = axis_size(axis)
    with ledger_scope(purpose, by_hand=True):
        return lax.ppermute(x, axis, [((i + by) % n, i) for i in range(n)])


@custom_vmap
def sum_over_replicas(counts: jax.Array) -> jax.Array:
    """Sum counts over the replicas of a `vmap`; outside of a `vmap` return them unchanged."""
    return counts


@sum_over_replicas.def_vmap
def _sum_mapped(size: int, is_mapped: list[bool], counts: jax.Array) -> tuple[jax.Array, bool]:
    with ledger_scope(ROUTING):
        return sum_over_replicas(counts.sum(axis=0, dtype=counts.dtype)), False
