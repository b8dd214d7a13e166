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
from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from compare.contract.communication import GRADIENTS
from compare.spec.axes import DP_REPLICATE
from jaxpar.comm import collectives

AXIS = DP_REPLICATE
BYTES_PER_MB = 1_000_000
METHODS = ("naive", "flat", "bucketed")
SENT_AS_IT_IS = 1 / 4
"""Of a bucket: a leaf as large as that has a message of its own. In a bucket it would save one message, and
be copied twice. JAX has no reduction of several arrays that stay where they are."""


def synchronize_gradients(gradients: Any, *, method: str, bucket_mb: float = 25.0, axis: str = AXIS) -> Any:
    """Replace each device's gradients by their mean over the replicas.

    Args:
        gradients: any pytree of arrays that vary along `axis`.
        method: naive, one all-reduce per leaf; flat, one for all of them (per dtype); bucketed, one per
            `bucket_mb`, beginning with the last leaves, whose gradients backward finishes first.
        bucket_mb: the size of a bucket in MB (1e6 bytes): it is closed before it would pass that. Leaves of
            a quarter of it or more are sent as they are.
        axis: the mesh axis of the replicas.

    Returns:
        A pytree of the same structure, equal on all devices of the axis.

    Raises:
        ValueError: no such method.
    """
    leaves, structure = jax.tree.flatten(gradients)
    if method not in METHODS:
        raise ValueError(f"method = {method}: choose from {', '.join(METHODS)}")
    limit = {"naive": 0, "flat": math.inf}.get(method, bucket_mb * BYTES_PER_MB)
    mean = list(leaves)
    for bucket in bucket_plan([(leaf.dtype, leaf.nbytes) for leaf in leaves], limit=limit):
        summed = _all_reduce_together([leaves[index] for index in bucket], axis=axis)
        for index, leaf in zip(bucket, summed, strict=True):
            mean[index] = leaf / collectives.axis_size(axis)
    return jax.tree.unflatten(structure, mean)


def bucket_plan(leaves: list[tuple[Hashable, int]], *, limit: float) -> list[list[int]]:
    """Buckets as plain data: which leaves go into which bucket.

    Args:
        leaves: kind and bytes of each; a bucket has leaves of one kind.
        limit: bytes; a bucket is closed before it would pass this, and a leaf of `SENT_AS_IT_IS` of it or
            more has its own. 0 gives every leaf its own.

    Returns:
        Per bucket, indices of leaves. Last leaves first: backward finishes them first, so that the first
        bucket can leave while backward goes on. (Leaves that stack scanned layers are all finished
        together, when the scan ends: buckets of those overlap nothing.)
    """
    buckets: list[list[int]] = []
    unfinished: dict[Hashable, list[int]] = {}
    for index, (kind, size) in reversed(list(enumerate(leaves))):
        if size >= SENT_AS_IT_IS * limit:
            buckets.append([index])
            continue
        members = unfinished.get(kind)
        if members is None or sum(leaves[member][1] for member in members) + size > limit:
            members = unfinished[kind] = []
            buckets.append(members)
        members.append(index)
    return buckets


def _all_reduce_together(leaves: list[jax.Array], *, axis: str) -> list[jax.Array]:
    """The leaves' sums by one all-reduce. Several are copied end to end for it; a single one is not."""
    all_reduce = partial(collectives.all_reduce, axis=axis, purpose=GRADIENTS)
    if len(leaves) == 1:
        return [all_reduce(leaves[0])]
    ends = list(itertools.accumulate(leaf.size for leaf in leaves))[:-1]
    parts = jnp.split(all_reduce(jnp.concatenate([leaf.ravel() for leaf in leaves])), ends)
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
