"""Data parallelism by hand: each device differentiates its rows, then all-reduces average gradients.

    array         on each device        communication
    batch         some of the rows      none
    parameters    all, marked varying   none: JAX then leaves their gradients local
    gradients     of the local rows     all-reduces, once a step, after all passes

    gradient_sync    all-reduces
    naive            one for each parameter
    bucketed         one for each bucket of at most bucket_mb
    flat             one for all parameters of one dtype and one set of axes

Small gradients are copied into one array and share an all-reduce. A large gradient has its own. The scan of
backward ends before the first all-reduce, since all blocks' gradients of one name are one array.

Runs inside `shard_map`, compiled with `collectives.KEEP_COLLECTIVES_APART`: XLA would otherwise merge
all-reduces.
"""

import itertools
import math
from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from compare.contract.communication import GRADIENTS
from compare.spec.axes import DATA, REPLICAS
from compare.spec.experiment import Experiment
from jaxpar.comm import collectives
from jaxpar.hooks import Hooks
from jaxpar.manual.strategy import Strategy
from jaxpar.placement import Placement

BYTES_PER_MB = 1_000_000
SENT_AS_IT_IS = 1 / 4
"""Fraction of a bucket's size from which a gradient has its own all-reduce.

A shared all-reduce saves one message and copies the gradient twice."""


def strategy(experiment: Experiment, placements: Any, hooks: Hooks) -> Strategy:
    """Keep gradients local until all passes are accumulated; then average them."""
    layout = experiment.layout
    axes = REPLICAS if layout.zero else DATA  # under ZeRO, fully_sharded reduces over dp_shard and ep
    method = layout.gradient_sync if layout.replicas > 1 else "naive"
    limit = {"naive": 0, "flat": math.inf, "bucketed": layout.bucket_mb * BYTES_PER_MB}[method]
    return Strategy(
        # A varying parameter has a local gradient. Otherwise autodiff would all-reduce in each pass.
        mark=lambda params: jax.tree.map(
            lambda p, x: collectives.to_varying(x, _reduced_axes(p, axes)), placements, params
        ),
        reduce=partial(synchronize_gradients, placements, axes=axes, limit=limit),
    )


def synchronize_gradients(placements: Any, gradients: Any, *, axes: tuple[str, ...], limit: float) -> Any:
    """Mean gradients over the replicas along `axes`, by one all-reduce for each bucket.

    Args:
        limit: bytes of a bucket at most; 0: one all-reduce for each leaf, infinity: one for all leaves.
    """
    leaves, structure = jax.tree.flatten(gradients)
    placed = jax.tree.leaves(placements)
    # A bucket has one dtype, and its leaves are split over equal axes: JAX types the copy by all its sources.
    sort = [(leaf.dtype, p.axes) for leaf, p in zip(leaves, placed, strict=True)]
    sizes = [leaf.nbytes for leaf in leaves]
    mean = list(leaves)
    for bucket in bucket_plan(list(zip(sort, sizes, strict=True)), limit=limit):
        # One all-reduce over the data axes, in the order of `bucket_plan`.
        reduced_axes = _reduced_axes(placed[bucket[0]], axes)
        summed = _all_reduce_together([leaves[index] for index in bucket], reduced_axes)
        for index, leaf in zip(bucket, summed, strict=True):
            mean[index] = leaf / collectives.axis_size(axes)
    return jax.tree.unflatten(structure, mean)


def bucket_plan(leaves: list[tuple[Hashable, int]], *, limit: float) -> list[list[int]]:
    """Indices of the leaves in each bucket, from (sort, bytes) of each leaf.

    Leaves are taken from last to first, as backward makes them. The leaves of a bucket have one sort. A
    bucket is closed before it would exceed `limit`. A leaf of at least `SENT_AS_IT_IS` times `limit` has its
    own bucket.
    """
    buckets: list[list[int]] = []
    unfinished: dict[Hashable, list[int]] = {}
    for index, (sort, size) in reversed(list(enumerate(leaves))):
        if size >= SENT_AS_IT_IS * limit:
            buckets.append([index])
            continue
        members = unfinished.get(sort)
        if members is None or sum(leaves[member][1] for member in members) + size > limit:
            members = unfinished[sort] = []
            buckets.append(members)
        members.append(index)
    return buckets


def _reduced_axes(p: Placement, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that do not split the parameter: an expert's gradient is already summed over ep."""
    return tuple(axis for axis in axes if axis not in p.axes)


def _all_reduce_together(leaves: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Sums of the leaves by one all-reduce; several leaves are copied into one array for it."""
    all_reduce = partial(collectives.all_reduce, axis=axes, purpose=GRADIENTS)
    if len(leaves) == 1:
        return [all_reduce(leaves[0])]
    ends = list(itertools.accumulate(leaf.size for leaf in leaves))[:-1]
    flat = jnp.split(all_reduce(jnp.concatenate([leaf.ravel() for leaf in leaves])), ends)
    return [x.reshape(leaf.shape) for x, leaf in zip(flat, leaves, strict=True)]
