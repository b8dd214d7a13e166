"""The full state in checkpoints: every device's part of it goes out, and comes in, as its placement says.

The files and their meaning: `compare.checkpoint`. They know nothing of the layout, so that a state
comes back on any other one, and on any other engine.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Part
from compare.numerics.boxes import Box
from compare.numerics.parameters import storage_dtype
from compare.spec.experiment import Model
from jaxpar.optimizer import moments
from jaxpar.shards import held, leaf_parts
from jaxpar.state import TrainState
from jaxpar.training_step import ShardedStep
from jaxpar.weights import STACKED, parameters_by_path


def state_parts(sharded: ShardedStep, state: TrainState, model: Model) -> Iterator[Part]:
    """Weights and moments as this process's devices hold them: copies, one at a time."""
    trees = {WEIGHTS: state.params, **moments(state.opt_state)}
    for group, tree in trees.items():
        for shard, array in held(tree, sharded.placements, model):
            if not shard.replica:
                yield group, shard, np.array(array)  # a CPU device's array may be the device's memory


def read_tree(
    reader: CheckpointReader, group: str, *, placements: Any, shardings: Any, model: Model
) -> dict[str, Any]:
    """Weights or moments of a checkpoint, placed: every device's part is read for itself; padding is zero.

    Args:
        reader: of the checkpoint.
        group: weights, m or v.
        placements: how leaves are padded, and their layers ordered.
        shardings: where they are to live.
        model: the sizes.

    Returns:
        A tree like the parameters.

    Raises:
        CheckpointError: it cannot be read.
    """
    how, where, placed = flatten_dict(placements), flatten_dict(shardings), {}
    dtype = storage_dtype(reader.description.experiment)
    for path, parameters in parameters_by_path(model).items():
        stored, sharding = how[path].stored_shape, where[path]
        part = sharding.shard_shape(stored)
        on = {device: np.zeros(part, dtype) for device in sharding.addressable_devices}
        for shard, device, at in leaf_parts(parameters, how[path], sharding, is_stacked=path[0] == STACKED):
            if device in on and math.prod(shard.shape):
                on[device][at] = reader.read(group, shard.name, Box(shard.offset, shard.shape))
        kind = sharding.memory_kind  # perhaps the host's
        arrays = [
            jax.device_put(array, SingleDeviceSharding(device, memory_kind=kind))
            for device, array in on.items()
        ]
        placed[path] = jax.make_array_from_single_device_arrays(stored, sharding, arrays)
    return unflatten_dict(placed)
