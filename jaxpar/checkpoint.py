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
from compare.checkpoint.saver import Part
from compare.numerics.boxes import Box
from compare.numerics.weights import Weights
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


def place_weights(
    weights: Weights, *, placements: Any, shardings: Any, model: Model, dtype: np.dtype
) -> dict[str, Any]:
    """Weights or moments on the devices, one leaf after the other: only what this process's devices hold.

    Args:
        weights: whole tensors by canonical name, in `dtype`: drawn, read or given.
        placements: how leaves are padded, and their layers ordered; padding is zero.
        shardings: where they are to live.
        model: the sizes.
        dtype: of all.

    Returns:
        A tree like the parameters.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    how, where, placed = flatten_dict(placements), flatten_dict(shardings), {}
    for path, parameters in parameters_by_path(model).items():
        stored, sharding = how[path].stored_shape, where[path]
        part = sharding.shard_shape(stored)
        on = {device: np.zeros(part, dtype) for device in sharding.addressable_devices}
        wanted: dict[str, dict[Box, list[np.ndarray]]] = {}  # a tensor is read once, whoever has what of it
        for shard, device, at in leaf_parts(parameters, how[path], sharding, is_stacked=path[0] == STACKED):
            if device in on and math.prod(shard.shape):
                box = Box(shard.offset, shard.shape)
                wanted.setdefault(shard.name, {}).setdefault(box, []).append(on[device][at])
        for name, targets in wanted.items():
            for copies, values in zip(targets.values(), weights.boxes(name, list(targets)), strict=True):
                for target in copies:
                    target[...] = values
        kind = sharding.memory_kind  # perhaps the host's
        arrays = [
            jax.device_put(array, SingleDeviceSharding(device, memory_kind=kind))
            for device, array in on.items()
        ]
        placed[path] = jax.make_array_from_single_device_arrays(stored, sharding, arrays)
    return unflatten_dict(placed)
