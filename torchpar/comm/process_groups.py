"""Process groups: how the ranks of a run join, split into groups, and leave."""

import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from torchpar.comm.gloo import BACKEND


def join_group(
    *, rank: int, world_size: int, device: torch.device, rendezvous: Path | None, timeout_s: float
) -> None:
    """Join the group of all ranks: NCCL for a GPU, which is then this rank's own, or gloo.

    The ranks meet in a new file, or at MASTER_ADDR and MASTER_PORT. A collective may take `timeout_s`.
    """
    dist.init_process_group(
        "nccl" if device.type == "cuda" else BACKEND,
        store=dist.FileStore(str(rendezvous), world_size) if rendezvous else None,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def leave_group() -> None:
    """Wait for the other ranks, if there are any. The process must end by os._exit after this.

    The group is not destroyed. If DDP's reducer outlives it, gloo's threads are joined under the GIL. One of
    them may need the GIL to drop a dispatch mode of `measure`: a deadlock at exit (torch 2.13).
    """
    if dist.is_initialized():
        dist.barrier()


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def make_group(partition: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of a partition of all ranks. All ranks make the same groups in the same order."""
    if len(partition) == 1:
        return world_group()
    group, _ = dist.new_subgroups_by_enumeration(partition)
    return group


def is_consequence(error: BaseException) -> bool:
    """True if an error only reports that another rank is gone."""
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset by peer", "gloo/transport", "broken pipe")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)
