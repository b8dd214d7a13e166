"""The state on the devices as canonical tensors.

Checkpoints (`compare.checkpoint`) do not depend on the layout: any other layout and engine resumes them. Each
process writes the shards of its devices.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.saver import Part
from compare.numerics.shards import Shard
from jaxpar.comm.hosts import to_host
from jaxpar.engine import Engine
from jaxpar.programs import TrainState
from jaxpar.weights import STACKED, parameters_by_path, to_canonical


def gather_tensors(tree: Any, engine: Engine) -> dict[str, np.ndarray]:
    """Full tensors by canonical name, fetched to the host, from a tree like the parameters."""
    unpadded = jax.tree.map(lambda p, x: p.unpad(x), engine.placements, to_host(tree))
    return to_canonical(unpadded, engine.experiment.model)


def state_parts(engine: Engine, state: TrainState) -> Iterator[Part]:
    """Weights and moments on this process's devices: copies, one at a time, each value once."""
    trees = {WEIGHTS: state.params, **state.opt_state}
    for group, tree in trees.items():
        for shard, array in local_shards(tree, engine):
            if not shard.replica:
                yield group, shard, np.array(array)  # a CPU device's array may be the device's memory


def local_shards(tree: Any, engine: Engine) -> Iterator[tuple[Shard, np.ndarray]]:
    """This process's shards of the canonical tensors, without padding, each with its values.

    `tree` is like the parameters: weights, gradients or moments on the devices.
    """
    leaves, placements = flatten_dict(tree), flatten_dict(engine.placements)
    for path, parameters in parameters_by_path(engine.experiment.model).items():
        leaf, p, is_stacked = leaves[path], placements[path], path[0] == STACKED
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
