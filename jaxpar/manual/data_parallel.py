"""Data parallelism by hand: every device differentiates its share of the batch, then gradients are averaged.

    parameters    marked varying: the gradient of what is each device's own stays local
    gradients     leaves of all blocks are finished together, when backward's scan ends
    buckets       small leaves are copied end to end, and one all-reduce sums them; large ones go as they are

Runs inside `shard_map`, compiled with `collectives.KEEP_COLLECTIVES_APART`: XLA would merge what naive and
bucketed keep apart.
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
"""Of a bucket: a leaf as large as that has a message of its own. In a bucket it would save one message, and
be copied twice. JAX has no reduction of several arrays that stay where they are."""


def strategy(experiment: Experiment, placements: Any, hooks: Hooks) -> Strategy:
    """Gradients stay local until all passes are accumulated."""
    layout = experiment.layout
    axes = REPLICAS if layout.zero else DATA  # ZeRO sums over what it splits
    method = layout.gradient_sync if layout.replicas > 1 else "naive"
    limit = {"naive": 0, "flat": math.inf, "bucketed": layout.bucket_mb * BYTES_PER_MB}[method]
    return Strategy(
        mark=lambda params: jax.tree.map(
            lambda p, x: collectives.to_varying(x, _beside(p, axes)), placements, params
        ),
        reduce=partial(synchronize_gradients, placements, axes=axes, limit=limit),
    )


def synchronize_gradients(placements: Any, gradients: Any, *, axes: tuple[str, ...], limit: float) -> Any:
    """Means over the replicas along these axes, by one all-reduce per bucket of at most `limit` bytes.

    0 is one per leaf (naive), infinity one for all (flat). Leaves that backward finishes first are first.
    """
    leaves, structure = jax.tree.flatten(gradients)
    # Joined with a leaf that other axes split, a repeated one would count as split.
    placed = jax.tree.leaves(placements)
    alike = [(leaf.dtype, p.axes) for leaf, p in zip(leaves, placed, strict=True)]
    sizes = [leaf.nbytes for leaf in leaves]
    mean = list(leaves)
    for bucket in bucket_plan(list(zip(alike, sizes, strict=True)), limit=limit):
        summed = _all_reduce_together([leaves[index] for index in bucket], _beside(placed[bucket[0]], axes))
        for index, leaf in zip(bucket, summed, strict=True):
            mean[index] = leaf / collectives.axis_size(axes)
    return jax.tree.unflatten(structure, mean)


def bucket_plan(leaves: list[tuple[Hashable, int]], *, limit: float) -> list[list[int]]:
    """Buckets of leaves of one sort, from the sort and bytes of each: their indices, the last leaves first.

    A bucket is closed before it would pass the limit. A leaf of `SENT_AS_IT_IS` of it has one to itself.
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


def _beside(p: Placement, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes that do not split a parameter: an expert's gradient is a sum over ep already."""
    return tuple(axis for axis in axes if axis not in p.axes)


def _all_reduce_together(leaves: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The leaves' sums by one all-reduce. Several are copied end to end for it; a single one is not."""
    all_reduce = partial(collectives.all_reduce, axis=axes, purpose=GRADIENTS)
    if len(leaves) == 1:
        return [all_reduce(leaves[0])]
    ends = list(itertools.accumulate(leaf.size for leaf in leaves))[:-1]
    parts = jnp.split(all_reduce(jnp.concatenate([leaf.ravel() for leaf in leaves])), ends)
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
