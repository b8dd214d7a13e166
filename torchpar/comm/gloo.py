"""gloo for the ranks of a CPU run: the backend "gloo_serial", with one worker a group and threads that yield.

gloo gives a group two workers. Each writes the name of its last collective into a string of the group without
a lock (`ProcessGroupGloo::runLoop`, torch 2.13). A name of more than 15 letters is on the heap, such as
DTensor's ALLGATHER_COALESCED. If two such collectives finish at once, the string is freed twice and the
process aborts. One worker runs collectives in order, as NCCL does.

A thread of gloo moves the bytes. When data arrives on a socket, it spins for the lock of the connection,
which a sending rank may hold. If the thread preempts the rank on the same core, the rank cannot release the
lock. A thread with the policy SCHED_BATCH does not preempt.
"""

import datetime
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress

import psutil
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from compare.side.processes import address_towards
from compare.spec.experiment import ExperimentError
from torchpar.private import checked, gloo_options

BACKEND = "gloo_serial"
CHECKED = "gloo_checked"
"""Backend for tests: before a collective it compares the calls and shapes of all ranks."""
INTERFACE = "GLOO_SOCKET_IFNAME"
LOST = (
    "connection closed by",
    "connection reset by peer",
    "connection was likely closed",
    "remote process exited",
    "gloo/transport",
    "broken pipe",
    "failed to pass monitoredbarrier",
)
"""Words of errors about a lost rank."""
WAITED = ("aborted", "timed out", "timeout")
"""Words of PyTorch's own errors about a rank that does not come."""


def choose_interface(host: str, port: int = 1) -> None:
    """Have gloo listen on the network interface that reaches `host`, unless the user chose one.

    By default gloo takes the address of this host's name, which is often a loopback address.
    Raises ExperimentError: there is no such host.
    """
    if os.environ.get(INTERFACE):
        return
    here = address_towards(host, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == here for address in addresses):
            os.environ[INTERFACE] = name
            return


@contextmanager
def yielding_threads() -> Generator[None]:
    """Threads that start inside have the policy SCHED_BATCH, on Linux under the usual policy."""
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


def make_backend(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroupGloo:
    interfaces, here = os.environ.get(INTERFACE), psutil.net_if_addrs()
    if interfaces and (unknown := [name for name in interfaces.split(",") if name not in here]):
        raise ExperimentError(
            f"{INTERFACE} = {interfaces}: {socket.gethostname()} has no interface {unknown[0]}, and has "
            f"{', '.join(here)}: correct the variable, or unset it"
        )
    with yielding_threads():
        if interfaces:
            devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
        else:
            devices = [ProcessGroupGloo.create_default_device()]
        return ProcessGroupGloo(store, rank, size, gloo_options(devices=devices, timeout=timeout, workers=1))


def make_checked_backend(
    store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
) -> dist.Backend:
    backend, helper = (
        make_backend(dist.PrefixStore(name, store), rank, size, timeout) for name in ("calls", "checks")
    )
    return checked(backend, helper)


def is_gloo(group: dist.ProcessGroup | None) -> bool:
    """True for a group of gloo, by default the group of all ranks."""
    return dist.get_backend(group) in (BACKEND, CHECKED, "gloo")


def is_consequence(error: BaseException) -> bool:
    """True if an error only reports that another rank is gone.

    NCCL reports with the same class that a GPU is out of memory, or that two ranks share a GPU.
    """
    signs = LOST + (WAITED if isinstance(error, dist.DistError) else ())
    return any(sign in str(error).lower() for sign in signs)


dist.Backend.register_backend(BACKEND, make_backend, devices=["cpu"])
dist.Backend.register_backend(CHECKED, make_checked_backend, devices=["cpu"])
