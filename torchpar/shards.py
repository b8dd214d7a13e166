"""Shards of torchpar's engines, from a `ParallelModel`'s description of its parameters.

Tensor parallelism leaves a rank a box of the canonical tensor: its own heads, MLP features or rows of the
vocabulary. Of that dp_shard leaves a range of elements, in the order of nanoGPT's tensor.

What a rank updates is described: its pieces. Gradients and moments are cut as they are. Under ZeRO 1 and 2 by
hand the module keeps whole weights besides. PyTorch's ZeroRedundancyOptimizer leaves weights and gradients
whole and deals moments out, each whole to one rank: see `moment_shards`.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from compare.numerics.boxes import from_boxes
from compare.numerics.parameters import Parameter, parameter_table
from compare.numerics.shards import Shard
from compare.numerics.weights import Weights
from compare.spec.axes import AXES, SPLIT, TP
from compare.spec.experiment import Model
from torchpar.comm.collectives import chunk_slices
from torchpar.comm.mesh import Mesh
from torchpar.parallel_model import ParallelModel, TensorsByName, local
from torchpar.weights import nanogpt_dims, nanogpt_name


def shards(parallel: ParallelModel, model: Model, mesh: Mesh) -> list[Shard]:
    """This rank's shards of the canonical tensors; of those on other stages of a pipeline it has none.

    Args:
        parallel: the model under its layout.
        model: the sizes.
        mesh: this rank's.
    """
    return [
        _shard(row, parallel, mesh)
        for row in parameter_table(model)
        if nanogpt_name(row.name) in parallel.parameters
    ]


def moment_shards(parallel: ParallelModel, model: Model, mesh: Mesh) -> list[Shard]:
    """This rank's shards of each moment: of all that it updates. Arguments as of `shards`."""
    return [
        _shard(row, parallel, mesh, of_moments=True)
        for row in parameter_table(model)
        if (name := nanogpt_name(row.name)) in parallel.parameters and parallel.keeps_moments(name)
    ]


def held(tensors: TensorsByName, shards: Iterable[Shard]) -> Iterator[tuple[Shard, np.ndarray]]:
    """This rank's shards of every canonical tensor, without padding: one shard at a time, each a copy.

    Args:
        tensors: `parallel.weights()` or `gradients()`, or `own_moments(key)`.
        shards: this rank's: `shards`, or `moment_shards`.
    """
    for shard in shards:
        flat = local(tensors[nanogpt_name(shard.name)]).detach().reshape(-1)
        array = flat[: math.prod(shard.held_shape)].to("cpu", copy=True).numpy()  # padding lies at the end
        if shard.elements is None:
            array = array.reshape([shard.shape[dim] for dim in shard.dim_order])
            array = array.transpose(np.argsort(shard.dim_order))
        yield shard, array


def shard_of(
    row: Parameter, mesh: Mesh, *, over_tp: bool, elements: slice | None = None, replica: int = 0
) -> Shard:
    """This rank's shard of a canonical tensor.

    Args:
        row: of the table.
        mesh: this rank's.
        over_tp: it has only its box along tp.
        elements: of the box; those of padding, which is behind, are left out. None for all.
        replica: as of `Shard`.
    """
    box = [slice(0, size) for size in row.shape]
    if over_tp:
        (dim,) = (dim for dim, axis in enumerate(row.axes) if SPLIT.get(axis) == TP)
        box[dim] = chunk_slices(row.shape[dim], mesh[TP].size)[mesh[TP].rank]
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


@torch.no_grad()
def fill(tensor: torch.Tensor, shard: Shard, weights: Weights) -> None:
    """Write a shard into the memory of this rank that holds it; padding lies at its end, and becomes zero.

    Args:
        tensor: a whole parameter or moment, a part, or a piece (n,); of a DTensor the local one.
        shard: what it holds.
        weights: whole tensors by canonical name; of these only the shard is read.
    """
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    array = from_boxes(shard, lambda boxes: weights.boxes(shard.name, boxes), dtype)
    if shard.elements is None and shard.dim_order:
        array = array.transpose(shard.dim_order)
    values = torch.from_numpy(np.ascontiguousarray(array).reshape(-1))
    if padding := tensor.numel() - len(values):
        values = torch.cat([values, values.new_zeros(padding)])
    tensor.copy_(values.view(tensor.shape))


def _shard(row: Parameter, parallel: ParallelModel, mesh: Mesh, *, of_moments: bool = False) -> Shard:
    name = nanogpt_name(row.name)
    over = {axis.name for axis in parallel.sharded_over.get(name, ())}
    differs_over = parallel.moments_spread_over(name) if of_moments else parallel.sharded_over.get(name, ())
    return shard_of(
        row,
        mesh,
        over_tp=TP in over,
        elements=parallel.elements.get(name),
        replica=_replica(mesh, {axis.name for axis in differs_over}, is_copy=name in parallel.copies),
    )


def _replica(mesh: Mesh, over: set[str], *, is_copy: bool) -> int:
    """This rank's number among those with the same part; another stage's copy is counted after them."""
    axes = [mesh[name] for name in AXES if name not in over]
    number = 0
    for axis in axes:
        number = number * axis.size + axis.rank
    return number + is_copy * math.prod(axis.size for axis in axes)
