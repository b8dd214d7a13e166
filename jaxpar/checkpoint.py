"""The full state, from the devices to canonical tensors.

Checkpoints (`compare.checkpoint`) know nothing of the layout: a state comes back on any other one, and on any
other engine. Every process writes what its devices hold.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.saver import Part
from compare.numerics.shards import Shard
from compare.spec.experiment import Model
from jaxpar.step import ShardedStep, TrainState
from jaxpar.weights import STACKED, parameters_by_path


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
        leaf, p, is_stacked = leaves[path], how[path], path[0] == STACKED
        layers = p.stored_layers() if is_stacked else [0]
        numbers = {device: number for number, device in enumerate(leaf.sharding.mesh.devices.flat)}
        for part in leaf.addressable_shards:
            ranges = [dim.indices(size)[:2] for dim, size in zip(part.index, leaf.shape, strict=True)]
            true = [p.unpadded_range(dim, *ranges[dim]) for dim in range(is_stacked, leaf.ndim)]
            offset, shape = tuple(start for start, _ in true), tuple(stop - start for start, stop in true)
            array = np.asarray(part.data)
            for place, layer in enumerate(layers[slice(*ranges[0])] if is_stacked else layers):
                name, device = parameters[layer].name, numbers[part.device]
                shard = Shard(name=name, device=device, offset=offset, shape=shape, replica=part.replica_id)
                of_layer = array[place] if is_stacked else array
                yield shard, of_layer[tuple(map(slice, shape))]
