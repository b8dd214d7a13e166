"""Replicas in types: parameters whose gradients are not summed yet, and a copy of one for each replica.

    {R:dp}   reduced: the same on every device of dp, and its gradient is {U:dp}
    {U:dp}   unreduced: each device has a part of a sum
    [R@dp]   a dim of replicas, split over dp: each device has its own entry

A cast to {R:dp} moves nothing. Its derivative is a sum over dp, and it runs where the cast is written. Some
operations have no typing rule: adding a bias {R:dp} to rows split over dp is an error. So the model is
`vmap`ped over replicas, and never sees dp: each replica has a copy of the parameter, and the copies' gradient
is {U:dp} again.

Source: "Autodiff and sharding" in JAX's documentation, which says that unreduced is such a dim in effect.

Legend: R replicas, here the devices of all axes that split a batch, its rows or its positions.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.spec.axes import DATA, PP
from jaxpar.placement import Placement

REPLICA = "replica"
"""The name of their dim in `vmap`: the number of one is `lax.axis_index` of it."""


def axes_of_replicas(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that split the rows or the positions of a batch, of a mesh with axes of these sizes."""
    return tuple(axis for axis in DATA if sizes[axis] > 1)


def axes_in(spec: P) -> set[str]:
    """The mesh axes that split any dim."""
    dims: Iterable[Any] = spec.partitions
    return {axis for dim in dims if dim for axis in (dim if isinstance(dim, tuple) else (dim,))}


def over_replicas(placements: Any, state: Literal["reduced", "unreduced"], *, sharded: bool) -> Any:
    """PartitionSpecs of parameters whose gradients are to be summed later, or of these gradients.

    Where dp_shard splits a parameter, its gradient has been summed over it: it is reduced along the others.
    """

    def type_of(p: Placement) -> P:
        spec = p.spec(sharded=sharded)
        stages = {PP} if p.degrees[PP] > 1 else set()  # of what is in no layer all stages make use
        axes = {*axes_of_replicas(p.degrees), *stages} - axes_in(spec)
        return P(*spec.partitions, **{state: axes})

    return jax.tree.map(type_of, placements)


def copies(w: jax.Array) -> jax.Array:
    """A copy for each device of the axes that w is reduced along: (R@dp, ..), or with pp (R@dp, S@pp, ..).

    Nothing moves, in backward neither: the gradient of what is reduced is unreduced.
    """
    reduced = jax.typeof(w).sharding.spec.reduced
    groups = [tuple(axis for axis in group if axis in reduced) for group in (DATA, (PP,))]
    return _copies(w, tuple(filter(None, groups)))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(w: jax.Array, axes: tuple[tuple[str, ...], ...]) -> jax.Array:
    mesh, dims = jax.typeof(w).sharding.mesh, jax.typeof(w).sharding.spec.partitions
    sizes = [math.prod(mesh.shape[axis] for axis in group) for group in axes]
    return jnp.broadcast_to(reshard(w, P(*dims)), (*sizes, *w.shape), out_sharding=P(*axes, *dims))


def _sum_later(axes: tuple[tuple[str, ...], ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    dims = jax.typeof(gradient).sharding.spec.partitions[len(axes) :]
    unreduced = {axis for group in axes for axis in group}
    return (lax.reduce_sum(gradient, range(len(axes)), out_sharding=P(*dims, unreduced=unreduced)),)


_copies.defvjp(lambda w, axes: (_copies(w, axes), None), _sum_later)


@custom_vmap
def own_copy(w: jax.Array, of_replica: jax.Array) -> jax.Array:
    """Each replica's copy of w {R:dp}: the `vmap` over replicas maps `of_replica`, but not w."""
    return reshard(w, P(*jax.typeof(w).sharding.spec.partitions))


@own_copy.def_vmap
def _of_every_replica(size: int, is_mapped: list[bool], w: jax.Array, of_replica: jax.Array):
    if axes_in(jax.typeof(w).sharding.spec) & {*DATA}:  # experts, to which the tokens of replicas go
        return w, False
    # A pipeline maps both over its stages: the replicas' turn comes after that.
    return (own_copy(w, of_replica) if is_mapped[0] else copies(w)), True
