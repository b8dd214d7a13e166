"""Process groups: how the ranks of a run find each other, split up, and part; and two cures for gloo.

gloo gives a group two workers, and each notes the collective that it has just finished in a string of the
group, which nothing guards (`ProcessGroupGloo::runLoop`, torch 2.13). A name of more than 15 letters, as
ALLGATHER_COALESCED of DTensor's, is on the heap: two that finish at once free it twice, and the process
aborts. So a group gets one worker, which works in order, as NCCL does.

A thread of gloo's moves the bytes. When a socket has news it spins for the lock of the connection, which a
rank that sends may hold. It wakes up on the rank's core and goes first, so that the rank cannot give it back.
A thread of the policy SCHED_BATCH does not go first when it wakes up.
"""

import datetime
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

from compare.side.processes import address_towards

INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_interface(host: str, port: int = 1) -> None:
    """Have gloo listen on the network interface by which `host` is reached, unless the user chose one.

    Left to itself gloo takes the address that this host's name resolves to, often one of the loopback.
    ExperimentError: there is no such host.
    """
    if os.environ.get(INTERFACE):
        return
    here = address_towards(host, port)
    for name, own in psutil.net_if_addrs().items():
        if any(address.address == here for address in own):
            os.environ[INTERFACE] = name
            return


def join_group(
    *, rank: int, world_size: int, device: torch.device, rendezvous: Path | None, timeout_s: float
) -> None:
    """Join the group of all ranks: of NCCL for a GPU, which is then this rank's own, or of gloo.

    They meet in a file that did not exist, or where MASTER_ADDR and MASTER_PORT say; a collective may take
    `timeout_s` seconds.
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


def leave_group() -> None:
    """Wait for the other ranks, if there are any. The process must end by os._exit after this.

    The group is not destroyed: if DDP's reducer outlives it, gloo's threads are joined under the GIL, which
    one of them may need to drop a dispatch mode of `measure`: a deadlock at exit (seen with torch 2.13).
    """
    if dist.is_initialized():
        dist.barrier()


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def make_group(partition: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of a partition of all ranks, which call this for all partitions in the same order."""
    if len(partition) == 1:
        return world_group()
    with group_threads():
        group, _ = dist.new_subgroups_by_enumeration(partition)
    return group


@contextmanager
def group_threads(backend: str = "") -> Generator[None]:
    """Make a backend's groups in it (default: the current one's), for the cures of gloo."""
    if (backend or dist.get_backend()) != "gloo":
        yield
        return
    with yielding_threads(), patch.object(distributed_c10d, "ProcessGroupGloo", _OneWorker):
        yield


@contextmanager
def yielding_threads() -> Generator[None]:
    """Threads that are started within are of SCHED_BATCH; on Linux, for a caller of the usual policy."""
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    usual = os.sched_getparam(0)
    with suppress(OSError):  # a system that forbids it: messages take more CPU time
        os.sched_setscheduler(0, os.SCHED_BATCH, usual)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, usual)


class _OneWorker(ProcessGroupGloo):
    """What PyTorch makes a group of, since it passes no options on to gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        options = ProcessGroupGloo._Options()  # ty: ignore[missing-attribute]
        interfaces = os.environ.get(INTERFACE)
        options._devices = (
            [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
            if interfaces
            else [ProcessGroupGloo.create_default_device()]
        )
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def is_consequence(error: BaseException) -> bool:
    """True if an error only says that another rank went away, so that the cause lies elsewhere."""
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset by peer", "gloo/transport", "broken pipe")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)
