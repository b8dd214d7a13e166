"""Conversion of checkpoints to orbax's format and back.

The tree has `params`, the moments `m` and `v`, and `step`, with stacked layers. Two JSON items accompany it:
the content of checkpoint.json with its digest, and SHA-256 digests of weights and moments, because orbax
stores none. Shapes have no padding.
"""

from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp

from compare.checkpoint.description import FORMAT, WEIGHTS, Checkpoint, digest_of, groups
from compare.checkpoint.reader import CheckpointError, CheckpointReader
from compare.checkpoint.saver import write_checkpoint
from compare.numerics.parameters import fingerprint
from compare.spec.experiment import revalidate
from jaxpar.weights import from_canonical, parameter_shapes, to_canonical

STATE, DESCRIPTION, SHA256 = "state", "description", "sha256"
ITEMS = {WEIGHTS: "params"}
"""Groups with another name in the tree."""


def export_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint in orbax's format, in a new folder. Raises CheckpointError: it is not complete."""
    reader = CheckpointReader(source)
    experiment = reader.description.experiment
    state = {
        ITEMS.get(group, group): from_canonical(dict(reader.group(group)), experiment.model)
        for group in groups(experiment)
    }
    words = msgspec.to_builtins(msgspec.structs.replace(reader.description, format=FORMAT, files={}))
    words["sha256"] = digest_of(words)
    sums = {group: fingerprint(reader.group(group)) for group in groups(experiment)}
    arguments = {
        STATE: ocp.args.StandardSave({**state, "step": np.asarray(reader.description.updates)}),
        DESCRIPTION: ocp.args.JsonSave(words),
        SHA256: ocp.args.JsonSave(sums),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(target.absolute(), ocp.args.Composite(**arguments))


def import_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint from orbax's format, in a new folder.

    Raises CheckpointError: it cannot be read, does not fit its model, or has changed.
    """
    if not (source / DESCRIPTION).is_dir():
        why = f"is not an orbax checkpoint of shardpair: it has no {DESCRIPTION}"
        raise CheckpointError(f"{source} {why}: save its weights as safetensors for --init_from")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:

        def restored(**items: Any) -> Any:
            return checkpointer.restore(source.absolute(), ocp.args.Composite(**items))

        try:
            words = restored(**{DESCRIPTION: ocp.args.JsonRestore()})[DESCRIPTION]
            description = msgspec.convert(words, Checkpoint)
            if description.format > 1 and description.sha256 != digest_of(words):
                raise CheckpointError("its description has changed since it was written (sha256)")
            experiment = description.experiment
            revalidate(experiment)
            like: dict[str, Any] = {
                ITEMS.get(group, group): parameter_shapes(experiment) for group in groups(experiment)
            }
            like["step"] = jax.ShapeDtypeStruct((), np.asarray(0).dtype)
            state = restored(**{STATE: ocp.args.StandardRestore(like)})[STATE]
            sums = restored(**{SHA256: ocp.args.JsonRestore()})[SHA256]
        except Exception as error:  # orbax documents no exceptions
            words = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{source} cannot be read by orbax: {words}") from None

    tensors = {}
    for group in groups(experiment):
        tensors[group] = to_canonical(state[ITEMS.get(group, group)], experiment.model)
        if fingerprint(tensors[group]) != sums.get(group):
            raise CheckpointError(f"{source}: {group} has changed since it was written (sha256)")
    write_checkpoint(target, description, tensors)
