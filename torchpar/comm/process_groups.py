"""The group of all ranks: joining and leaving."""

import datetime

import torch
import torch.distributed as dist

from compare.side.host_facts import agree, facts_here
from compare.spec.experiment import Experiment
from torchpar import PACKAGES
from torchpar.comm.collectives import Axis
from torchpar.comm import gloo
from torchpar.launch import Rank, gpu_of

BACKENDS = {"cpu": gloo.BACKEND, "gpu": "nccl"}
"""By platform."""


def join_ranks(rank: Rank, platform: str, reads: Experiment | None = None) -> torch.device:
    """Join the group of all ranks, of NCCL or gloo. Returns this rank's device.

    Raises ExperimentError on all ranks: the hosts' versions, or their data of `reads`, differ.
    """
    device = torch.device("cuda", gpu_of(rank.local_rank)) if platform == "gpu" else torch.device("cpu")
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    if rank.world_size > 1:
        dist.init_process_group(
            BACKENDS[platform],
            store=dist.FileStore(str(rank.rendezvous), rank.world_size) if rank.rendezvous else None,
            rank=rank.rank,
            world_size=rank.world_size,
            # The supervisor gives up first, and names the rank that is behind.
            timeout=datetime.timedelta(seconds=rank.timeout_s + 30.0),
            device_id=device if is_gpu else None,
        )
    rank.at(0, "setting up")
    if rank.world_size > 1 and not rank.rendezvous:  # there may be several hosts
        world = Axis.from_group(world_group())
        agree(world.all_gather_objects(facts_here("torchpar", PACKAGES, reads)))
    return device


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
