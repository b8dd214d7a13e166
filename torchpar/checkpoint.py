"""A rank's state as canonical tensors: first weights in, checkpoints out, moments back in.

A model begins on PyTorch's meta device, with shapes alone. A strategy shards it and fills the shards, at most
a unit at a time. So a rank needs memory for its shards and one unit.

Checkpoints (`compare.checkpoint`) do not depend on the layout: any other layout and engine resumes them.
Gradients and moments are sharded as the weights are. Only PyTorch's ZeRO-1 gives ranks whole moments.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Part
from compare.contract.communication import RECORD
from compare.numerics.boxes import Weights
from compare.numerics.parameters import Parameter, parameter_table
from compare.numerics.shards import Shard
from compare.spec.axes import AXES, SPLIT, parts_of
from compare.spec.experiment import Experiment, Model
from torchpar.comm.collectives import chunk_slices
from torchpar.comm.mesh import Mesh
from torchpar.dtensors import elements_of, empty_on
from torchpar.engine import Engine, Fill
from torchpar.run import Run
from torchpar.sharding import TensorsByName, local
from torchpar.weights import moment_keys, nanogpt_dims, nanogpt_name, write_shard


def fill_with(weights: Weights, experiment: Experiment, mesh: Mesh) -> Fill:
    """A function that gives parameters of a GPT memory on the device, and their shard of `weights`."""
    rows = {nanogpt_name(row.name): row for row in parameter_table(experiment.model)}

    def fill(model: nn.Module, within: Iterable[nn.Module] | None = None) -> None:
        chosen = None if within is None else {p for module in within for p in module.parameters()}
        for name, parameter in model.named_parameters():
            if local(parameter).is_meta and (chosen is None or parameter in chosen):
                memory = empty_on(parameter.detach(), mesh.device)
                real = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                real.__dict__.update(parameter.__dict__)
                torch.utils.swap_tensors(parameter, real)  # ties, hooks and marks stay on the same object
                shard = shard_of(rows[name], mesh, elements=elements_of(parameter, mesh))
                write_shard(local(parameter).detach(), shard, weights)

    return fill


def shards_of(engine: Engine, model: Model, mesh: Mesh, *, of_moments: bool = False) -> list[Shard]:
    """This rank's shards of the canonical tensors, or of each moment."""
    described, sharding = [], engine.sharding
    for row in parameter_table(model):
        name = nanogpt_name(row.name)
        if name not in engine.parameters or (of_moments and not sharding.updates(name)):
            continue
        axes = sharding.axes.get(name, ())
        if of_moments and sharding.owned:
            axes = sharding.owned[1:]
        differing = {part for axis in axes for part in parts_of(axis.name)}
        replica, replica_axes = 0, [mesh[axis] for axis in AXES if axis not in differing]
        for axis in replica_axes:  # this rank's number among the ranks that have the same shard
            replica = replica * axis.size + axis.rank
        if name in sharding.counted_elsewhere:  # the copy of another stage counts after these
            replica += math.prod(axis.size for axis in replica_axes)
        described.append(shard_of(row, mesh, elements=sharding.elements.get(name), replica=replica))
    return described


def shard_of(row: Parameter, mesh: Mesh, *, elements: slice | None = None, replica: int = 0) -> Shard:
    """A rank's shard of a canonical tensor, without padding: its box by tp and ep, and `elements` of the box.

    The elements are in the order of nanoGPT's tensor.
    """
    box = [slice(0, size) for size in row.shape]
    for dim, axis in enumerate(row.axes):
        if axis in SPLIT:
            along = mesh[SPLIT[axis]]
            box[dim] = chunk_slices(row.shape[dim], along.size)[along.rank]
    shape = tuple(side.stop - side.start for side in box)
    size = math.prod(shape)
    return Shard(
        name=row.name,
        device=mesh.world.rank,
        offset=tuple(side.start for side in box),
        shape=shape,
        elements=None if elements is None else (min(elements.start, size), min(elements.stop, size)),
        dim_order=nanogpt_dims(row),
        replica=replica,
    )


def local_shards(tensors: TensorsByName, shards: Iterable[Shard]) -> Iterator[tuple[Shard, np.ndarray]]:
    """This rank's shards of weights, gradients or moments, without padding: copies, one at a time."""
    for shard in shards:
        flat = local(tensors[nanogpt_name(shard.name)]).detach().reshape(-1)
        array = flat[: math.prod(shard.local_shape)].to("cpu", copy=True).numpy()  # padding is at the end
        if shard.elements is None:
            array = array.reshape([shard.shape[dim] for dim in shard.dim_order])
            array = array.transpose(np.argsort(shard.dim_order))
        yield shard, array


def local_moments(engine: Engine, key: str) -> TensorsByName:
    """This rank's shards of one moment, such as exp_avg; 0 before the first update."""
    state = engine.optimizer.state
    return {
        name: state[p][key].to(p.device) if state.get(p) else torch.zeros_like(p.detach())
        for name, p in engine.parameters.items()
        if engine.sharding.updates(name)
    }


def all_moments(engine: Engine, key: str) -> TensorsByName:
    """This rank's shards of one moment, also of parameters that other ranks own. Every rank calls it."""
    moments = local_moments(engine, key)
    if engine.sharding.owned is None:
        return moments
    _, axis = engine.sharding.owned
    zeros = {name: torch.zeros_like(p.detach()) for name, p in engine.parameters.items()}
    for name, moment in zeros.items():
        if name in moments:
            moment.copy_(moments[name])
        axis.all_reduce(moment, purpose=RECORD)  # the moment of its owner, and zeros
    return zeros


def state_parts(run: Run) -> Iterator[Part]:
    """This rank's shards of the weights, and of the moments that its optimizer has."""
    engine, model, mesh = run.engine, run.experiment.model, run.mesh
    shards = shards_of(engine, model, mesh)
    for shard, array in local_shards(engine.weights(), shards):
        yield WEIGHTS, shard, array
    shards = shards_of(engine, model, mesh, of_moments=True)
    for group, key in moment_keys(run.experiment.optimizer).items():
        for shard, array in local_shards(local_moments(engine, key), shards):
            yield group, shard, array


def restore_moments(run: Run, checkpoint: Path) -> None:
    """Read this rank's moments and the run's step from a checkpoint. Raises CheckpointError."""
    reader = CheckpointReader(checkpoint)
    engine, experiment = run.engine, run.experiment
    run.state.step, run.state.updates = reader.description.step, reader.description.updates
    if not reader.description.updates:
        return
    for shard in shards_of(engine, experiment.model, run.mesh, of_moments=True):
        parameter = engine.parameters[nanogpt_name(shard.name)]
        state = engine.optimizer.state[parameter]
        if experiment.optimizer.name == "adamw":
            state["step"] = torch.tensor(float(run.state.updates), device=parameter.device)
        for group, key in moment_keys(experiment.optimizer).items():
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            write_shard(local(state[key]), shard, reader.group(group))
