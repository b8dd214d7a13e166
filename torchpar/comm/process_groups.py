"""Process groups: how the ranks of a run find each other, split up, and part."""

import datetime
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from torchpar.comm.gloo_threads import yielding_threads
from torchpar.comm.gloo_workers import one_worker


def join_group(
    *, rank: int, world_size: int, device: torch.device, rendezvous: Path | None, timeout_s: float
) -> None:
    """Join the group of all ranks. Leave it with `leave_group`.

    Args:
        rank, world_size: this process among all.
        device: NCCL for a GPU, which is then this rank's own; gloo for the CPU.
        rendezvous: a file that all ranks can reach and that did not exist; None reads MASTER_ADDR and
            MASTER_PORT, which torchrun sets.
        timeout_s: seconds that a collective may take.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    with group_threads(backend):
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(rendezvous), world_size) if rendezvous else None,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )


def join_absent(*, rank: int, world_size: int) -> None:
    """Be one rank among others that are not there: each collective is done at once, and moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def leave_group() -> None:
    """Wait for the other ranks, if there are any, so that none hangs up on another.

    The process must end by os._exit after this.

    The group is not destroyed: if DDP's reducer outlives it, gloo's threads are joined under the GIL, and
    one of them may need the GIL to drop a dispatch mode that `measure` had installed: a deadlock at
    exit (seen with torch 2.13).
    """
    if dist.is_initialized():
        dist.barrier()


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def make_stock_group() -> dist.ProcessGroup:
    """A further group of all ranks, as PyTorch makes it: gloo has two workers, whose threads do not yield."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def make_group(partition: list[list[int]]) -> dist.ProcessGroup | None:
    """This rank's group of a partition of all ranks; None where the groups have one member each.

    Every rank calls this with the same partition, and for all partitions in the same order.
    """
    if len(partition) == 1:
        return world_group()
    if len(partition[0]) == 1:
        return None
    with group_threads():
        group, _ = dist.new_subgroups_by_enumeration(partition)
    return group


@contextmanager
def group_threads(backend: str = "") -> Generator[None]:
    """Make a backend's groups in it (default: the current one's): gloo's have one worker, and its threads
    yield to the rank.
    """
    if (backend or dist.get_backend()) != "gloo":
        yield
        return
    with yielding_threads(), one_worker():
        yield


def is_consequence(error: BaseException) -> bool:
    """True if an error only says that another rank went away, so that the cause lies elsewhere."""
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset by peer", "gloo/transport", "broken pipe")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)
