"""The group of all ranks, joining and leaving, and groups of some ranks."""

import datetime
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from compare.side.host_facts import agree, facts_here
from compare.spec.experiment import Experiment
from torchpar import PACKAGES
from torchpar.comm import gloo
from torchpar.comm.collectives import MESH, Axis
from torchpar.launch import Rank, gpu_of

BACKENDS = {"cpu": gloo.BACKEND, "gpu": "nccl"}
"""By platform."""
NCCL_SETTINGS = {
    # Kernels of several groups run at a time: every rank then launches them in the order of its calls.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    # How many calls PyTorch's flight recorder keeps. After a hang they show which rank is behind.
    "TORCH_FR_BUFFER_SIZE": "2000",
    # It also keeps whether a call has begun.
    "TORCH_NCCL_ENABLE_TIMING": "1",
}
"""Variables of NCCL (2.26 or newer) and PyTorch, unless the user has set them."""


def join_ranks(rank: Rank, platform: str, reads: Experiment | None = None) -> torch.device:
    """Join the group of all ranks, of NCCL or gloo. Returns this rank's device.

    Raises ExperimentError on all ranks: the hosts' versions, or their data of `reads`, differ.
    """
    device = torch.device("cuda", gpu_of(rank.local_rank)) if platform == "gpu" else torch.device("cpu")
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
        os.environ.update({name: os.environ.get(name, value) for name, value in NCCL_SETTINGS.items()})
    if rank.world_size > 1:
        dist.init_process_group(
            BACKENDS[platform],
            store=dist.FileStore(str(rank.rendezvous), rank.world_size) if rank.rendezvous else None,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=patience(rank),
            device_id=device if is_gpu else None,
        )
    rank.at(0, "setting up")
    if rank.world_size > 1 and not rank.rendezvous:  # there may be several hosts
        world = Axis.from_group(world_group())
        agree(world.all_gather_objects(facts_here("torchpar", PACKAGES, reads)))
    return device


def patience(rank: Rank) -> datetime.timedelta:
    """The time-out of a group. The supervisor gives up before, and names the rank that is behind."""
    return datetime.timedelta(seconds=rank.timeout_s + 30.0)


def make_group(lines: Sequence[list[int]], timeout: datetime.timedelta | None = None) -> dist.ProcessGroup:
    """This rank's group. The lines divide all ranks, which call this together, into groups of one size."""
    if len(lines) == 1:
        return world_group()
    if dist.get_backend() == BACKENDS["gpu"]:
        # One split of NCCL's communicator. A new group for each line would be a split for each line.
        group = dist.split_group(split_ranks=list(lines), timeout=timeout)
    else:
        group = dist.new_subgroups_by_enumeration(list(lines), timeout=timeout)[0]
    assert group is not None
    return group


def make_group_again(
    group: dist.ProcessGroup, axis: str, timeout: datetime.timedelta | None
) -> dist.ProcessGroup:
    """A second group of the same ranks, for the mesh axis with this name. All ranks call this together."""
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout,
        use_local_synchronization=True,
        group_desc=MESH + axis,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def leave_group() -> None:
    """Wait for the other ranks, if there are any. The process must end by os._exit after this.

    NCCL's groups are destroyed: a rank that exits takes memory with it that the last kernels of other ranks
    may still read. gloo's group is not destroyed. If DDP's reducer outlives it, gloo's threads are joined
    under the GIL. One of them may need the GIL to drop a dispatch mode of `measure`: a deadlock at exit
    (torch 2.13).
    """
    if dist.is_initialized():
        dist.barrier()
        if not gloo.is_gloo(dist.group.WORLD):
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            dist.destroy_process_group()


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group
