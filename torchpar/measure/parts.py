"""Whole tensors of a trace, put together from the parts of all ranks. NumPy arrays, except for `local_array`.

A passes, b rows and t positions of a rank.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from compare.contract.trace import LOSS, Place, split_dims
from compare.spec.axes import DATA, SPLIT, TP, parts_of
from compare.spec.experiment import Layout
from torchpar.dtensors import axis_names

Coordinates = Mapping[str, int]
"""A rank's position in the mesh, by axis."""


def local_array(tensors: Mapping[int, torch.Tensor], place: Place, passes: int) -> np.ndarray:
    """A rank's part of a place, (A, b, t, ..), from the tensors of its passes or microbatches by number.

    Of the loss (A, microbatches). 16 bits become float32. All ranks with a part call this together.
    """
    ordered = [local_tensor(tensors[number]) for number in sorted(tensors)]
    if place.name == LOSS:
        return torch.stack(ordered).unflatten(0, (passes, -1)).cpu().numpy()
    features = [
        -1 if SPLIT.get(axis) == TP else size
        for axis, size in zip(place.axes[3:], place.shape[3:], strict=True)
    ]
    whole = torch.cat(ordered).flatten(2)
    if -1 in features:
        whole = whole.unflatten(2, features)
    if whole.dtype in (torch.bfloat16, torch.float16):
        whole = whole.float()
    return whole.unflatten(0, (passes, -1)).cpu().numpy()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows, positions and features. Partial sums of a DTensor are added up."""
    if not isinstance(tensor, DTensor):
        return tensor
    named = zip(axis_names(tensor.device_mesh), tensor.placements, strict=True)
    return tensor.redistribute(placements=[_of_rank(name, at, tensor.ndim) for name, at in named]).to_local()


def _of_rank(name: str, placement: Placement, dims: int) -> Placement:
    """Rows split along the axes of data, other dims as they are, and no partial sums."""
    if dims and all(axis in DATA for axis in parts_of(name)):
        return Shard(0)
    return Replicate() if placement.is_partial() else placement


def join(
    parts: Mapping[int, np.ndarray], place: Place, at: Sequence[Coordinates], layout: Layout, *, summed: bool
) -> dict[int, np.ndarray]:
    """Whole tensors by device of tp, from the parts (A, b, t, ..) of ranks. Device 0 alone if tp splits it.

    Args:
        at: coordinates of each rank.
        summed: the devices of tp have terms of a sum.

    Raises RuntimeError: the parts do not fit the whole tensor, or leave a gap.
    """
    whole: dict[int, np.ndarray] = {}
    is_there: dict[int, np.ndarray] = {}
    for rank, part in parts.items():
        indices, over_tp = indices_of(part.shape, place, at[rank], layout)
        device = 0 if over_tp or summed else at[rank][TP]
        box = np.ix_(*indices)
        total = whole.setdefault(device, np.zeros(place.shape, part.dtype))
        total[box] = total[box] + part if summed else part
        is_there.setdefault(device, np.zeros(place.shape, bool))[box] = True
    if not whole or not all(found.all() for found in is_there.values()):
        raise RuntimeError(f"trace: no rank has all or a part of {place.name}")
    return whole


def join_losses(
    parts: Mapping[int, np.ndarray], at: Sequence[Coordinates], *, summed: bool
) -> dict[int, np.ndarray]:
    """Losses (A,) by device of tp, from the losses (A, microbatches) of ranks: means over ranks and
    microbatches; gradients are `summed` over microbatches."""
    by_device: dict[int, list[np.ndarray]] = {}
    for rank, part in parts.items():
        by_device.setdefault(at[rank][TP], []).append(part.sum(1) if summed else part.mean(1))
    return {device: np.mean(losses, axis=0) for device, losses in by_device.items()}


def indices_of(
    shape: Sequence[int], place: Place, at: Coordinates, layout: Layout
) -> tuple[list[np.ndarray], bool]:
    """Indices of a rank's part in each dim of the whole tensor, and whether tp splits one of the dims.

    A dim of full size is whole on the rank. Another is split by all axes that may split it, or by all but tp.
    Raises RuntimeError: no axes give this size.
    """
    splits, indices, over_tp = split_dims(place, layout), [], False
    for dim, (size, full) in enumerate(zip(shape, place.shape, strict=True)):
        axes = [axis for axis, (split, _) in splits.items() if split == dim]
        for chosen in ([], axes, [axis for axis in axes if axis != TP]):
            index = np.arange(full)
            for axis in chosen:
                of_axis = splits[axis][1][at[axis]]
                index = of_axis[np.isin(of_axis, index)] if axis != TP else index[np.isin(index, of_axis)]
            if len(index) == size:
                break
        else:
            raise RuntimeError(
                f"trace: dim {place.axes[dim]} of {place.name} has size {size} on a rank, of {full} in all"
            )
        over_tp |= TP in chosen
        indices.append(index)
    return indices, over_tp
