"""Shards of jaxpar's engines, from the placements and shardings of a `ShardedStep`.

    weights at rest                   shards(step.placements, step.params, model)
    moments, and finished gradients   shards(step.placements, step.moments, model)
    gradients while they accumulate   shards(step.placements, step.accumulated, model)

So under ZeRO 1 and 2 weights are whole along dp_shard, and moments are not.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding

from compare.numerics.parameters import Parameter
from compare.numerics.shards import Shard
from compare.spec.experiment import Model
from jaxpar.placement import Placement
from jaxpar.weights import STACKED, parameters_by_path

Index = tuple[int | slice, ...]


def shards(placements: Any, shardings: Any, model: Model) -> list[Shard]:
    """The shards of every canonical tensor on every device of the mesh.

    Args:
        placements: how leaves are padded, and their layers ordered.
        shardings: where they live: NamedShardings over one mesh.
        model: the sizes.
    """
    where, how = flatten_dict(shardings), flatten_dict(placements)
    return [
        shard
        for path, parameters in parameters_by_path(model).items()
        for shard, _, _ in leaf_parts(parameters, how[path], where[path], is_stacked=path[0] == STACKED)
    ]


def held(tree: Any, placements: Any, model: Model) -> Iterator[tuple[Shard, np.ndarray]]:
    """This process's shards of every canonical tensor, without padding: one shard at a time.

    Args:
        tree: placed weights, gradients or moments, with the parameters' structure.
        placements: of its leaves.
        model: the sizes.

    Yields:
        A shard, and its values, of its shape.
    """
    leaves, how = flatten_dict(tree), flatten_dict(placements)
    for path, parameters in parameters_by_path(model).items():
        leaf = leaves[path]
        on = {part.device: np.asarray(part.data) for part in leaf.addressable_shards}
        for shard, device, at in leaf_parts(
            parameters, how[path], leaf.sharding, is_stacked=path[0] == STACKED
        ):
            if device in on:
                yield shard, on[device][at]


def leaf_parts(
    parameters: list[Parameter], p: Placement, sharding: NamedSharding, *, is_stacked: bool
) -> Iterator[tuple[Shard, jax.Device, Index]]:
    """The shards of one leaf's parameters, and where in a device's array each lies."""
    stored, layers = p.stored_shape, p.stored_layers() if is_stacked else [0]
    parts_of = sharding.devices_indices_map(stored)
    holders: Counter[tuple] = Counter()
    for number, device in enumerate(sharding.mesh.devices.flat):
        ranges = [part.indices(size)[:2] for part, size in zip(parts_of[device], stored, strict=True)]
        replica = holders[tuple(ranges)]
        holders[tuple(ranges)] += 1
        own = layers[slice(*ranges[0])] if is_stacked else layers
        first_dim = int(is_stacked)
        true = [p.true_range(dim, *ranges[dim]) for dim in range(first_dim, len(stored))]
        shape = tuple(stop - start for start, stop in true)
        for place, layer in enumerate(own):
            shard = Shard(
                name=parameters[layer].name,
                device=number,
                offset=tuple(start for start, _ in true),
                shape=shape,
                replica=replica,
            )
            within = tuple(slice(size) for size in shape)
            yield shard, device, (place, *within) if is_stacked else within
