"""Mistakes in saying where tensors live: a partial sum taken for the sum, a part's mean for part of a sum."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from compare.spec.axes import BATCH, TP
from torchpar.compiler import data_parallel, tensor_parallel
from torchpar.compiler.placement import Placements, axes_of, of_activation


def dropped_all_reduce() -> AbstractContextManager:
    """Each replica's part of a gradient's sum is said to be the gradient."""
    return _parts_for_sums(BATCH)


def missing_norm_psum() -> AbstractContextManager:
    """Gradients of LayerNorms over a part of the sequence are said to be those over all of it."""
    return _parts_for_sums((TP,))


def sum_for_mean() -> AbstractContextManager:
    """The mean over a rank's own rows is said to be a part of the loss's sum, and not of its average."""
    right = data_parallel.split_batch

    def of_own_rows(logits_NV: DTensor, targets_N: DTensor) -> torch.Tensor:
        own = torch.nn.functional.cross_entropy(logits_NV.to_local(), targets_N.to_local())
        devices = logits_NV.device_mesh
        sums = tuple(Partial() if how.is_shard() else how for how in of_activation(devices))
        return DTensor.from_local(own, devices, sums, run_check=False)

    def split_batch(*arguments, **_):
        right(*arguments, cross_entropy=of_own_rows)

    return patch.object(data_parallel, "split_batch", split_batch)


def dropped_tp_all_reduce() -> AbstractContextManager:
    """A rank's part of what attention and MLP add to the stream is said to be all of it."""
    right = tensor_parallel._at

    def at(x: torch.Tensor, devices: DeviceMesh, placements: Placements) -> DTensor:
        if isinstance(x, DTensor) and type(x.placements[axes_of(devices).index(TP)]) is Partial:
            x = taken_for_sum(x, (TP,))
        return right(x, devices, placements)

    return patch.object(tensor_parallel, "_at", at)


def taken_for_sum(x: DTensor, axes: Collection[str]) -> DTensor:
    """What is a partial sum along these axes, said to be whole."""
    names = axes_of(x.device_mesh)
    said = tuple(
        Replicate() if name in axes and how.is_partial() else how
        for name, how in zip(names, x.placements, strict=True)
    )
    return DTensor.from_local(
        x.to_local(), x.device_mesh, said, run_check=False, shape=x.shape, stride=x.stride()
    )


def _parts_for_sums(axes: Collection[str]) -> AbstractContextManager:
    right = data_parallel.synchronize_gradients

    def wrong(gradient: torch.Tensor, placements: Placements) -> torch.Tensor:
        assert isinstance(gradient, DTensor)
        return right(taken_for_sum(gradient, axes), placements)

    return patch.object(data_parallel, "synchronize_gradients", wrong)
