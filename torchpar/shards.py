"""A rank's shards of the canonical tensors: filled with first weights, written to checkpoints, read back.

Tensor parallelism leaves a rank a box of the canonical tensor: its own heads, MLP features or rows of the
vocabulary. Of that dp_shard leaves a range of elements, in the order of nanoGPT's tensor. Gradients and
moments are cut as the weights are; only PyTorch's ZeroRedundancyOptimizer deals out moments of whole weights.

A model begins on PyTorch's meta device, with shapes alone. A strategy cuts it, and has what is left filled,
at most a unit at a time: so a rank's memory at start is what it keeps, and one unit.
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
from compare.numerics.boxes import Weights, from_boxes
from compare.numerics.parameters import Parameter, parameter_table
from compare.numerics.shards import Shard
from compare.spec.axes import AXES, SPLIT, parts_of
from compare.spec.experiment import Experiment, Model
from torchpar.comm.collectives import chunk_slices
from torchpar.comm.mesh import Mesh
from torchpar.dtensors import elements_of, empty_on
from torchpar.model import GPT
from torchpar.parallel_model import Fill, ParallelModel, TensorsByName, local
from torchpar.run import Run
from torchpar.weights import moment_keys, nanogpt_dims, nanogpt_name


def shards(parallel: ParallelModel, model: Model, mesh: Mesh, *, of_moments: bool = False) -> list[Shard]:
    """This rank's shards of the canonical tensors, or of each moment."""
    described = []
    for row in parameter_table(model):
        name = nanogpt_name(row.name)
        if name not in parallel.parameters or (of_moments and not parallel.keeps_moments(name)):
            continue
        own = of_moments and parallel.updates
        spread = own[1:] if own else parallel.sharded_over.get(name, ())
        differs = {part for axis in spread for part in parts_of(axis.name)}
        replica, alike = 0, [mesh[axis] for axis in AXES if axis not in differs]
        for axis in alike:  # this rank's number among those with the same part
            replica = replica * axis.size + axis.rank
        if name in parallel.copies:  # another stage's copy is counted after them
            replica += math.prod(axis.size for axis in alike)
        described.append(shard_of(row, mesh, elements=parallel.elements.get(name), replica=replica))
    return described


def shard_of(row: Parameter, mesh: Mesh, *, elements: slice | None = None, replica: int = 0) -> Shard:
    """A rank's shard of a canonical tensor: its box by tp and ep, and `elements` of it; without padding."""
    box = [slice(0, size) for size in row.shape]
    for dim, axis in enumerate(row.axes):
        if axis in SPLIT:
            along = mesh[SPLIT[axis]]
            box[dim] = chunk_slices(row.shape[dim], along.size)[along.rank]
    shape = tuple(part.stop - part.start for part in box)
    size = math.prod(shape)
    return Shard(
        name=row.name,
        device=mesh.world.rank,
        offset=tuple(part.start for part in box),
        shape=shape,
        elements=None if elements is None else (min(elements.start, size), min(elements.stop, size)),
        dim_order=nanogpt_dims(row),
        replica=replica,
    )


def held(tensors: TensorsByName, shards: Iterable[Shard]) -> Iterator[tuple[Shard, np.ndarray]]:
    """This rank's shards of weights, gradients or own moments, without padding: copies, one at a time."""
    for shard in shards:
        flat = local(tensors[nanogpt_name(shard.name)]).detach().reshape(-1)
        array = flat[: math.prod(shard.held_shape)].to("cpu", copy=True).numpy()  # padding lies at the end
        if shard.elements is None:
            array = array.reshape([shard.shape[dim] for dim in shard.dim_order])
            array = array.transpose(np.argsort(shard.dim_order))
        yield shard, array


@torch.no_grad()
def write(tensor: torch.Tensor, shard: Shard, weights: Weights) -> None:
    """Write a shard of the weights into the tensor that holds it, of any shape; padding becomes zero."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    array = from_boxes(shard, lambda boxes: weights.boxes(shard.name, boxes), dtype)
    if shard.elements is None and shard.dim_order:
        array = array.transpose(shard.dim_order)
    values = torch.from_numpy(np.ascontiguousarray(array).reshape(-1))
    if padding := tensor.numel() - len(values):
        values = torch.cat([values, values.new_zeros(padding)])
    tensor.copy_(values.view(tensor.shape))


def empty_model(experiment: Experiment) -> GPT:
    """The whole model on the meta device: shapes and dtypes, no values and no memory."""
    dtype = torch.float64 if experiment.precision.dtype == "float64" else torch.float32
    with torch.device("meta"):
        return GPT(experiment.model, loss_chunks=experiment.train.loss_chunks).to(dtype=dtype)


def fill_with(weights: Weights, experiment: Experiment, mesh: Mesh) -> Fill:
    """Gives parameters of a GPT memory on this rank's device, and of the weights what this rank keeps."""
    rows = {nanogpt_name(row.name): row for row in parameter_table(experiment.model)}

    def fill(model: nn.Module, within: Iterable[nn.Module] | None = None) -> None:
        chosen = None if within is None else {p for module in within for p in module.parameters()}
        for name, parameter in model.named_parameters():
            if local(parameter).is_meta and (chosen is None or parameter in chosen):
                memory = empty_on(parameter.detach(), mesh.device)
                real = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                real.__dict__.update(parameter.__dict__)
                torch.utils.swap_tensors(parameter, real)  # it stays itself: ties, hooks and marks
                part = shard_of(rows[name], mesh, elements=elements_of(parameter, mesh))
                write(local(parameter).detach(), part, weights)

    return fill


def state_parts(run: Run) -> Iterator[Part]:
    """This rank's pieces of the weights, and the moments that its optimizer keeps."""
    parallel, model, mesh = run.parallel, run.experiment.model, run.mesh
    for shard, array in held(parallel.weights(), shards(parallel, model, mesh)):
        yield WEIGHTS, shard, array
    for group, key in moment_keys(run.experiment.optimizer).items():
        for shard, array in held(parallel.own_moments(key), shards(parallel, model, mesh, of_moments=True)):
            yield group, shard, array


def restore_moments(run: Run, checkpoint: Path) -> None:
    """Give this rank's optimizer the moments of a checkpoint, and the run its place; or CheckpointError."""
    reader = CheckpointReader(checkpoint)
    parallel, experiment = run.parallel, run.experiment
    run.state.step, run.state.updates = reader.description.step, reader.description.updates
    if not reader.description.updates:
        return
    for shard in shards(parallel, experiment.model, run.mesh, of_moments=True):
        parameter = parallel.parameters[nanogpt_name(shard.name)]
        state = parallel.optimizer.state[parameter]
        if experiment.optimizer.name == "adamw":
            state["step"] = torch.tensor(float(run.state.updates), device=parameter.device)
        for group, key in moment_keys(experiment.optimizer).items():
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            write(local(state[key]), shard, reader.group(group))
