"""Sharding types of parameters and gradients, and the operations for which JAX has no typing rule.

    {R:dp}   reduced: equal on all devices of dp; the gradient is {U:dp}
    {U:dp}   unreduced: a partial sum on each device of dp; the sum is pending
    [B@dp]   dp splits this dim

A cast (`reshard`) to {R:dp} sends nothing. A cast from {U:dp} sums over dp: the derivative of the first.

Source: "Autodiff and sharding" in JAX's documentation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.spec.axes import DATA, PP
from jaxpar.placement import Placement


def axes_of_dims(x: jax.Array) -> list[tuple[str, ...]]:
    """The mesh axes that split each dim of x."""
    dims = jax.typeof(x).sharding.spec.partitions
    return [dim if isinstance(dim, tuple) else (dim,) if dim else () for dim in dims]


def without(x: jax.Array, axis: str) -> list[tuple[str, ...] | None]:
    """`axes_of_dims` without one axis, for a PartitionSpec."""
    return [tuple(name for name in axes if name != axis) or None for axes in axes_of_dims(x)]


def reduced_specs(placements: Any, *, sharded: bool) -> Any:
    """PartitionSpecs of parameters whose gradients are partial sums.

    They are reduced along the axes that split a batch and, outside the blocks, along pp; but not along an
    axis that splits the parameter itself.
    """
    return jax.tree.map(lambda p: P(*_partitions(p, sharded), reduced=_pending(p, sharded)), placements)


def unreduced_specs(placements: Any, *, sharded: bool) -> Any:
    """PartitionSpecs of the gradients of `reduced_specs`."""
    return jax.tree.map(lambda p: P(*_partitions(p, sharded), unreduced=_pending(p, sharded)), placements)


def _partitions(p: Placement, sharded: bool) -> tuple[Any, ...]:
    return p.spec(sharded=sharded).partitions


def _pending(p: Placement, sharded: bool) -> set[str]:
    axes = {axis for axis in (*DATA, PP) if p.degrees[axis] > 1}
    return axes - {axis for axis in p.dims if sharded or axis not in p.shards}


def broadcast(w: jax.Array, x: jax.Array) -> jax.Array:
    """w {R:dp} as an operand of x [B@dp, ...], in x's shape. Nothing is sent; backward neither.

    JAX has no rule for an elementwise operation on a reduced array and one that the same axis splits. Here
    the gradient is summed over the rows of each device, and stays {U:dp}.
    """
    spec = jax.typeof(w).sharding.spec
    if not spec.reduced:
        return w
    return _broadcast(w, spec, x.shape, P(*axes_of_dims(x)))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _broadcast(w: jax.Array, spec: P, shape: tuple[int, ...], out: P) -> jax.Array:
    return jnp.broadcast_to(reshard(w, P(*spec.partitions)), shape, out_sharding=out)


def _sum_rows(spec: P, shape: tuple[int, ...], out: P, _: None, g: jax.Array) -> tuple[jax.Array]:
    rows = range(g.ndim - len(spec.partitions))
    return (lax.reduce_sum(g, rows, out_sharding=P(*spec.partitions, unreduced=spec.reduced)),)


_broadcast.defvjp(lambda w, *static: (_broadcast(w, *static), None), _sum_rows)


def per_device(attend: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """attend(q, k, v, ...) of (B, T, H, D) with each device's part. More arrays are positions of q and of k.

    A loop over positions that are split has no type, and neither has the kernel of cuDNN. Where cp splits the
    positions of q, k and v are {R:cp}. Other loops keep their types.
    """
    q_BTHD, *kv = arrays[:3]
    (_, of_positions, *_), spec = axes_of_dims(q_BTHD), jax.typeof(q_BTHD).sharding.spec
    if arrays[3:] and not of_positions:
        return attend(*arrays)
    specs = spec, *(jax.typeof(x).sharding.spec for x in kv), P(of_positions), P()
    *qkv, positions = *arrays[:3], [reshard(x, s) for x, s in zip(arrays[3:], specs[3:], strict=False)]

    @partial(jax.shard_map, in_specs=specs[: len(arrays)], out_specs=spec)
    def of_device(q_BtHD: jax.Array, *others: jax.Array) -> jax.Array:
        # Nothing is sent. The gradients of k and v are partial sums, {U:cp}.
        kv = (lax.pcast(x, of_positions, to="varying") if of_positions else x for x in others[:2])
        return attend(q_BtHD, *kv, *others[2:])

    return of_device(*qkv, *positions)


def vmap(f: Callable[..., Any], in_axes: tuple[Any, ...]) -> Callable[..., Any]:
    """`jax.vmap` of f(params, *arrays) over the first dim of `params`, of which some may be reduced.

    `jax.vmap` rejects a reduced argument. So it maps the others, and f has the reduced ones from outside.
    """

    def mapped(params: Any, *arrays: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        is_reduced = [bool(jax.typeof(w).sharding.spec.reduced) for w in leaves]

        def f_of_entries(others: list[jax.Array], *arrays: Any) -> Any:
            rest, x = iter(others), jax.tree.leaves(arrays)[-1]
            entries = [
                _entry(w, x) if reduced else next(rest) for w, reduced in zip(leaves, is_reduced, strict=True)
            ]
            return f(structure.unflatten(entries), *arrays)

        others = [w for w, reduced in zip(leaves, is_reduced, strict=True) if not reduced]
        return jax.vmap(f_of_entries, in_axes=(0 if others else None, *in_axes[1:]))(others, *arrays)

    return mapped


@custom_vmap
def _entry(w_S: jax.Array, x: jax.Array) -> jax.Array:
    """Inside a `vmap` that maps x and not w_S: the entry of w_S that belongs to x."""
    spec = jax.typeof(w_S).sharding.spec  # never runs outside a `vmap`: only its type is read
    zeros = jnp.zeros(w_S.shape[1:], w_S.dtype, out_sharding=P(*spec.partitions[1:]))
    return reshard(zeros, P(*spec.partitions[1:], reduced=spec.reduced))


@_entry.def_vmap
def _all_entries(size: int, is_mapped: list[bool], w_S: jax.Array, x_S: jax.Array) -> tuple[jax.Array, bool]:
    return w_S, True
