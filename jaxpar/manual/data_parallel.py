"""Data parallelism by hand: every device differentiates its share of the batch, then gradients are averaged.

To be called inside `shard_map`, on gradients that are each device's own (`collectives.to_varying` on the
parameters before differentiating). Works for any pytree:

    def gradients_of(params, batch):            # batch: this device's rows
        local = to_varying(params, AXIS)
        value, gradients = jax.value_and_grad(loss)(local, batch)
        return all_reduce_mean(value, AXIS), synchronize_gradients(gradients, method="bucketed", bucket_mb=25)

    step = jax.jit(per_device(gradients_of, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P()))

Compile with `collectives.KEEP_COLLECTIVES_APART`, or XLA merges what naive and bucketed keep apart.
"""

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from compare.contract.axes import DP_REPLICATE
from compare.contract.communication import GRADIENTS
from jaxpar.comm import collectives

AXIS = DP_REPLICATE
BYTES_PER_MB = 1_000_000
METHODS = ("naive", "flat", "bucketed")


def synchronize_gradients(gradients: Any, *, method: str, bucket_mb: float = 25.0, axis: str = AXIS) -> Any:
    """Replace each device's gradients by their mean over the replicas.

    Args:
        gradients: any pytree of arrays that vary along `axis`.
        method: naive, one all-reduce per leaf; flat, one for all of them (per dtype); bucketed, one per
            `bucket_mb`, beginning with the last leaves, whose gradients backward finishes first.
        bucket_mb: the size of a bucket in MB (1e6 bytes). A leaf larger than that is cut.
        axis: the mesh axis of the replicas.

    Returns:
        A pytree of the same structure, equal on all devices of the axis.

    Raises:
        ValueError: no such method.
    """
    leaves, structure = jax.tree.flatten(gradients)
    if method not in METHODS:
        raise ValueError(f"method = {method}: choose from {', '.join(METHODS)}")
    if method == "naive":
        summed = [collectives.all_reduce(leaf, axis, purpose=GRADIENTS) for leaf in leaves]
    else:
        bucket_bytes = math.inf if method == "flat" else bucket_mb * BYTES_PER_MB
        summed = _all_reduce_buckets(leaves, bucket_bytes=bucket_bytes, axis=axis)
    replicas = collectives.axis_size(axis)
    return jax.tree.unflatten(structure, [leaf / replicas for leaf in summed])


def bucket_plan(sizes: list[int], *, capacity: int) -> list[list[tuple[int, int, int]]]:
    """Buckets as plain data: which part of which leaf goes into which bucket.

    Args:
        sizes: elements of each leaf.
        capacity: elements of a bucket; all but the last are filled.

    Returns:
        Per bucket, pieces (leaf, start, stop) of flattened leaves. Last leaves first: backward finishes
        them first, so that the first bucket can leave while backward goes on. (Leaves that stack scanned
        layers are all finished together, when the scan ends: buckets of those overlap nothing.)
    """
    buckets: list[list[tuple[int, int, int]]] = [[]]
    room = capacity
    for leaf in reversed(range(len(sizes))):
        start = 0
        while start < sizes[leaf]:
            if not room:
                buckets.append([])
                room = capacity
            stop = min(sizes[leaf], start + room)
            buckets[-1].append((leaf, start, stop))
            room -= stop - start
            start = stop
    return buckets


def _all_reduce_buckets(leaves: list[jax.Array], *, bucket_bytes: float, axis: str) -> list[jax.Array]:
    """The leaves' sums over an axis, a bucket at a time. A bucket has one dtype."""
    all_reduce = partial(collectives.all_reduce, axis=axis, purpose=GRADIENTS)
    pieces: list[list[jax.Array]] = [[] for _ in leaves]
    for dtype in sorted({leaf.dtype for leaf in leaves}, key=str):
        sizes = [leaf.size if leaf.dtype == dtype else 0 for leaf in leaves]
        capacity = max(1, int(min(bucket_bytes / dtype.itemsize, sum(sizes))))
        for bucket in bucket_plan(sizes, capacity=capacity):
            parts = [leaves[leaf].ravel()[start:stop] for leaf, start, stop in bucket]
            summed = all_reduce(jnp.concatenate(parts))
            ends = list(itertools.accumulate(part.size for part in parts))[:-1]
            for (leaf, _, _), part in zip(bucket, jnp.split(summed, ends), strict=True):
                pieces[leaf].append(part)
    return [
        # An empty leaf is in no bucket.
        jnp.concatenate(parts).reshape(leaf.shape) if parts else all_reduce(leaf)
        for leaf, parts in zip(leaves, pieces, strict=True)
    ]
