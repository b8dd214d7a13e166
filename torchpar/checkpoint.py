"""The full state in checkpoints: each rank's pieces of it go out, and come in.

The files and their meaning: `compare.checkpoint`. They know nothing of the layout, so that a state
comes back on any other one, and on any other engine. Weights come back as the model is split:
`first_weights`.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Part
from torchpar.parallel_model import local
from torchpar.run import Run
from torchpar.shards import fill, held, moment_shards, shards
from torchpar.weights import moment_keys, nanogpt_name


def state_parts(run: Run) -> Iterator[Part]:
    """This rank's pieces of the weights, and the moments that its optimizer keeps: copies, one at a time."""
    parallel, model, mesh = run.parallel, run.experiment.model, run.mesh
    for shard, array in held(parallel.weights(), shards(parallel, model, mesh)):
        yield WEIGHTS, shard, array
    for group, key in moment_keys(run.experiment.optimizer).items():
        for shard, array in held(parallel.own_moments(key), moment_shards(parallel, model, mesh)):
            yield group, shard, array


def restore_moments(run: Run, checkpoint: Path) -> None:
    """Give this rank's optimizer the moments of a checkpoint, and the state its place in the data.

    Raises:
        CheckpointError: it cannot be read.
    """
    reader = CheckpointReader(checkpoint)
    parallel, experiment = run.parallel, run.experiment
    run.state.step, run.state.updates = reader.description.step, reader.description.updates
    if not reader.description.updates:
        return
    for shard in moment_shards(parallel, experiment.model, run.mesh):
        parameter = parallel.parameters[nanogpt_name(shard.name)]
        state = parallel.optimizer.state[parameter]
        if experiment.optimizer.name == "adamw":
            state["step"] = torch.tensor(float(run.state.updates), device=parameter.device)
        for group, key in moment_keys(experiment.optimizer).items():
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            fill(local(state[key]), shard, reader.group(group))
