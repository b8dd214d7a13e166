"""orbax checkpoints: out of a checkpoint of ours, and into one.

The state as JAX's world keeps it: a tree of weights and trees of moments like it, layers stacked, and the
step; beside it, as JSON, what checkpoint.json says. True shapes: no padding, and no layout.

What a training saves itself is `compare.checkpoint`, which both frameworks read: orbax has no place
for a leaf that a layout has padded, and PyTorch cannot read what it writes.
"""

from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp

from compare.checkpoint.description import WEIGHTS, Checkpoint, groups, tensor_shapes
from compare.checkpoint.reader import CheckpointError, CheckpointReader
from compare.checkpoint.saver import write_checkpoint
from compare.numerics.parameters import storage_dtype
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, Model, revalidate
from jaxpar.weights import from_canonical, to_canonical

STATE, DESCRIPTION = "state", "description"
PARAMS = "params"


def export_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint of ours as one of orbax, in a folder that must not exist.

    Raises CheckpointError: the checkpoint is not complete.
    """
    reader = CheckpointReader(source)
    description, model = reader.description, reader.description.experiment.model
    state: dict[str, Any] = {
        _item(group): from_canonical(dict(reader.group(group)), model)
        for group in groups(description.experiment)
    }
    state["step"] = np.asarray(description.updates)
    words = msgspec.to_builtins(msgspec.structs.replace(description, files={}))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        arguments = {STATE: ocp.args.StandardSave(state), DESCRIPTION: ocp.args.JsonSave(words)}
        checkpointer.save(target.absolute(), ocp.args.Composite(**arguments))


def import_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint of orbax, of these names, as one of ours, in a folder that must not exist.

    Raises CheckpointError: it cannot be read, or does not fit the model that it names.
    """
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        try:
            words = checkpointer.restore(
                source.absolute(), ocp.args.Composite(**{DESCRIPTION: ocp.args.JsonRestore()})
            )[DESCRIPTION]
            description = msgspec.convert(words, Checkpoint)
            revalidate(description.experiment)
            like = _abstract(description.experiment)
            state = checkpointer.restore(
                source.absolute(), ocp.args.Composite(**{STATE: ocp.args.StandardRestore(like)})
            )[STATE]
        except Exception as error:  # orbax raises whatever its layers do
            raise CheckpointError(
                f"{source} cannot be read by orbax: {' '.join(str(error).split())[:300]}"
            ) from None
    model = description.experiment.model

    def parts():
        for group in groups(description.experiment):
            for name, array in to_canonical(state[_item(group)], model).items():
                shard = Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape)
                yield group, shard, array

    write_checkpoint(target, description, parts())


def _item(group: str) -> str:
    return PARAMS if group == WEIGHTS else group


def _abstract(experiment: Experiment) -> dict[str, Any]:
    """Shapes and dtypes of the state's tree."""
    dtype, model = storage_dtype(experiment), experiment.model
    state: dict[str, Any] = {
        _item(group): jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, dtype), _shapes(group, experiment, model)
        )
        for group in groups(experiment)
    }
    state["step"] = jax.ShapeDtypeStruct((), np.asarray(0).dtype)
    return state


def _shapes(group: str, experiment: Experiment, model: Model) -> dict[str, Any]:
    shapes = tensor_shapes(experiment)
    prefix = f"{group}/"
    empty = {
        name.removeprefix(prefix): np.broadcast_to(np.float32(0), shape)
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }
    return from_canonical(empty, model)
