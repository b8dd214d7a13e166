"""Collectives along a mesh axis, for jax-manual: thin functions over `jax.lax`.

    function          sends                 transpose
    all_reduce        all-reduce            to_varying
    to_varying        nothing               all_reduce
    all_gather        all-gather            reduce_scatter
    reduce_scatter    reduce-scatter        all_gather
    all_to_all        all-to-all            all_to_all
    shift             collective permute    -

Each call names its purpose in a named scope, from which the ledger reads it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from compare.contract.communication import ROUTING

# XLA's combiner merges small all-reduces, also behind `lax.optimization_barrier`. A hand-written schedule of
# messages needs them apart.
KEEP_COLLECTIVES_APART = {
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner,gpu-all-reduce-combiner,all-reduce-combiner"
}

# Without check_vma JAX transposes psum differently: the loss is right, and gradients are too large by the
# size of the axis.
per_device: Callable[..., Any] = partial(jax.shard_map, check_vma=True)


def ledger_scope(purpose: str, *, by_hand: bool = False) -> AbstractContextManager:
    """Name scope of collectives with one purpose (`contract.communication`), for the ledger.

    `by_hand` marks a collective in a hand-written backward: the ledger then uses this purpose, not the
    purpose of its derivative.
    """
    name = f"for_{purpose.replace(' ', '_')}" + "_by_hand" * by_hand
    return jax.named_scope(name) if purpose else nullcontext()


def run_if(
    predicate: jax.Array,
    runs: np.ndarray,
    compute: Callable[..., Any],
    otherwise: Callable[..., Any],
    *operands: Any,
) -> Any:
    """`lax.cond` in a loop. A scope gives the ledger the number of iterations that run `compute`.

    `runs` is the predicate by iteration, (iterations,), or by iteration and pipeline rank.
    """
    counts = np.atleast_1d(runs.sum(axis=0))

    def scoped(*operands: Any) -> Any:
        with jax.named_scope(f"runs_{'_'.join(map(str, counts))}_of_{len(runs)}"):
            return compute(*operands)

    return lax.cond(predicate, scoped, otherwise, *operands)


axis_size = lax.axis_size
Axes = str | tuple[str, ...]
"""One mesh axis, or several that act as one axis, the first outermost."""


def all_reduce(x: jax.Array, axis: Axes, *, purpose: str = "") -> jax.Array:
    """Sum of x, any shape, over one or several mesh axes, on each of their devices."""
    # Skip axes of one device: XLA on a CPU would copy x.
    names = (axis,) if isinstance(axis, str) else axis
    axes = [name for name in names if axis_size(name) > 1 or name in jax.typeof(x).mat.varying]
    with ledger_scope(purpose):
        return lax.psum(x, tuple(axes)) if axes else x


def all_reduce_max(x: jax.Array, axis: str, *, purpose: str = "") -> jax.Array:
    """Maximum of x, any shape, over a mesh axis, on each of its devices. Not differentiable."""
    with ledger_scope(purpose):
        return lax.pmax(x, axis)


def to_varying(tree: Any, axis: str | Sequence[str], *, purpose: str = "") -> Any:
    """Mark arrays that are equal on all devices of the axes as varying. Its transpose: all-reduce.

    Autodiff sums the gradient of an invarying array over devices. The gradient of a varying array stays
    local.
    """
    axes = tuple(a for a in ((axis,) if isinstance(axis, str) else axis) if axis_size(a) > 1)
    if not axes:
        return tree
    with ledger_scope(purpose):
        return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), tree)


def all_gather(x: jax.Array, axis: Axes, *, dim: int, purpose: str = "", is_equal: bool = False) -> jax.Array:
    """Full array of the shards of n devices, (.., d, ..) -> (.., n d, ..) at `dim`.

    `is_equal` marks the result as equal on all devices, for updated parameters.
    """
    with ledger_scope(purpose):
        return lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying" if is_equal else "varying")


def reduce_scatter(x: jax.Array, axis: Axes, *, dim: int, purpose: str = "") -> jax.Array:
    """Local shard at `dim` of the sum over n devices: (.., d, ..) -> (.., d / n, ..)."""
    with ledger_scope(purpose):
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: jax.Array, axis: Axes, *, split: int, joined: int, purpose: str = "") -> jax.Array:
    """Exchange dims over n devices, `split` for `joined`: (.., s, .., j, ..) -> (.., s / n, .., n j, ..)."""
    with ledger_scope(purpose):
        return lax.all_to_all(x, axis, split_axis=split, concat_axis=joined, tiled=True)


def local_shard(x: jax.Array, axis: Axes, *, dim: int) -> jax.Array:
    """Local shard of a full array, (.., d, ..) -> (.., d / n, ..) at `dim`; nothing is sent."""
    size = x.shape[dim] // axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


def local_indices(count: int, axis: Axes, *, of: Callable[[int], Any]) -> jax.Array:
    """Global indices (count,) of local heads or positions, from `of`, which maps a count to all indices."""
    return local_shard(jnp.asarray(of(count * axis_size(axis))), axis, dim=0)


def shift(x: jax.Array, axis: Axes, *, by: int = 1, purpose: str = "") -> jax.Array:
    """Send x, any shape, `by` positions further along a mesh axis, a ring; return the x that arrives.

    Callers write its backward by hand, so autodiff does not differentiate it.
    """
    n = axis_size(axis)
    with ledger_scope(purpose, by_hand=True):
        return lax.ppermute(x, axis, [(i, (i + by) % n) for i in range(n)])


@custom_vmap
def sum_over_replicas(counts: jax.Array) -> jax.Array:
    """Sum counts over the replicas of a `vmap`; outside a `vmap` return them unchanged."""
    return counts


@sum_over_replicas.def_vmap
def _sum_mapped(size: int, is_mapped: list[bool], counts: jax.Array) -> tuple[jax.Array, bool]:
    with ledger_scope(ROUTING):
        return sum_over_replicas(counts.sum(axis=0, dtype=counts.dtype)), False
