"""Silence: from some step on, collectives are complete as soon as they begin, and send nothing.

For the time of a twin (`Request.silent`), whose numbers mean nothing. What a wrapper learns of the other
ranks at first, such as the shapes that a pipeline's stages exchange, it must have learned before.
"""

import importlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchpar.comm.collectives import Axis, ProcessGroup


def fall_silent(axes: Iterable[Axis], device: torch.device, module: nn.Module) -> None:
    """Make collectives on these axes no-ops, for all callers; call it on all ranks together.

    Args:
        axes: none of them over the group of all ranks, which still has to gather what ranks found.
        device: of this rank.
        module: what runs: DDP in it takes no result of a silent collective.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    torch.set_flush_denormal(True)  # buffers that received nothing may hold denormal numbers, which are slow
    for group in {axis.group for axis in axes if axis.group}:
        assert group is not dist.group.WORLD
        _silence(group, device)
    for wrapper in module.modules():
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.register_comm_hook(None, _take_own)


def _silence(group: ProcessGroup, device: torch.device) -> None:
    """Let PyTorch's fake backend do the group's collectives on a device."""
    ranks = dist.get_process_group_ranks(group)
    fake = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    assert isinstance(fake, ProcessGroup)
    group._register_backend(device, ProcessGroup.BackendType.CUSTOM, fake._get_backend(device))


def _take_own(state: None, bucket):  # not annotated: DDP would insist on its own classes
    """DDP's communication hook: a bucket as if it had been reduced."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer().div_(dist.get_world_size()))
    return future
