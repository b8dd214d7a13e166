"""The full state, from the devices to canonical tensors.

Checkpoints (`compare.checkpoint`) know nothing of the layout: a state comes back on any other one, and on any
other engine. Every process writes what its devices hold.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.saver import Part
from compare.numerics.parameters import Parameter
from compare.numerics.shards import Shard
from compare.spec.experiment import Model
from jaxpar.placement import Placement
from jaxpar.step import ShardedStep, TrainState
from jaxpar.weights import STACKED, parameters_by_path

Index = tuple[int | slice, ...]


def state_parts(sharded: ShardedStep, state: TrainState, model: Model) -> Iterator[Part]:
    """Weights and moments as this process's devices hold them: copies, one at a time."""
    trees = {WEIGHTS: state.params, **state.opt_state}
    for group, tree in trees.items():
        for shard, array in local_shards(tree, sharded.placements, model):
            if not shard.replica:
                yield group, shard, np.array(array)  # a CPU device's array may be the device's memory


def local_shards(tree: Any, placements: Any, model: Model) -> Iterator[tuple[Shard, np.ndarray]]:
    """This process's shards of every canonical tensor, without padding, each with its values.

    `tree` is of placed weights, gradients or moments, and `placements` of its leaves.
    """
    leaves, how = flatten_dict(tree), flatten_dict(placements)
    for path, parameters in parameters_by_path(model).items():
        leaf = leaves[path]
        on = {part.device: np.asarray(part.data) for part in leaf.addressable_shards}
        for shard, device, index in _shards_of(
            parameters, how[path], leaf.sharding, is_stacked=path[0] == STACKED
        ):
            if device in on:
                yield shard, on[device][index]


def _shards_of(
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
        first_dim = int(is_stacked)
        true = [p.true_range(dim, *ranges[dim]) for dim in range(first_dim, len(stored))]
        offset, shape = tuple(start for start, _ in true), tuple(stop - start for start, stop in true)
        within = tuple(slice(size) for size in shape)
        for place, layer in enumerate(layers[slice(*ranges[0])] if is_stacked else layers):
            name = parameters[layer].name
            shard = Shard(name=name, device=number, offset=offset, shape=shape, replica=replica)
            yield shard, device, (place, *within) if is_stacked else within
