"""Processes of JAX on several hosts: joining them, and moving arrays between NumPy and all of their devices.

With one process each function is what JAX's own does. With several, a process reaches only its own devices:
it places the part of an array that these hold, and what it fetches XLA gathers first.
"""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from compare.contract.across_hosts import host_names
from compare.contract.other_hosts import HostFacts, facts_here, leave_hosts, require_agreement
from compare.contract.processes import Process
from compare.host.facts import MissingDevicesError
from compare.spec.experiment import Experiment
from jaxpar.configuration import PACKAGES

_here: list[Process] = []  # which of the processes this one is, once it has joined them
LATER_S = 60.0
"""JAX aborts, without a word of Python's, when it misses a process: so much later than our own time-out."""
_LOST = (
    "gloo",
    "connection closed by peer",
    "connection reset by peer",
    "coordination service",
    "socket closed",
)


def join(process: Process, *, devices: int, platform: str, timeout_s: float) -> None:
    """Become one of the processes of a run, which drive as many devices each; before JAX starts a backend.

    Raises MissingDevicesError: the processes do not divide the devices.
    """
    if devices % process.count:
        raise MissingDevicesError(
            f"the layout needs {devices} devices, which {process.count} processes ({process.told_by}) do "
            "not divide: start another number of them"
        )
    _here.append(process)
    own = devices // process.count
    # Told by SLURM, JAX would give each task one GPU: a task here drives all of its part.
    local = range(process.local * own, (process.local + 1) * own) if platform == "gpu" else None
    # Its handler of SIGTERM would take the place of ours, and SLURM's scancel would end nothing for 30 s.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        process.coordinator,
        num_processes=process.count,
        process_id=process.number,
        local_device_ids=local,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeout_s), 1),
        heartbeat_timeout_seconds=int(timeout_s + LATER_S),
    )


def spread(tree: Any, shardings: Any) -> Any:
    """NumPy arrays, the same in every process, as arrays over the devices.

    `shardings` is one, or a tree of them like `tree`.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda x: shardings, tree)
    # Not device_put, which compares the values of all processes, each time.
    return jax.tree.map(
        lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]),
        tree,
        shardings,
    )


def fetch(tree: Any) -> Any:
    """A tree of arrays as NumPy, whole, in every process; all processes call it together.

    What is NumPy's already stays as it is.
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def whole(x: Any) -> np.ndarray:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True) if isinstance(x, jax.Array) else x)

    return jax.tree.map(whole, tree)


def gathered(values: list[Any]) -> list[Any]:
    """Numbers of each process, as many in each, in the order of the processes."""
    if jax.process_count() == 1:
        return values
    return multihost_utils.process_allgather(np.asarray(values)).reshape(-1).tolist()


def exchange(text: str) -> list[str]:
    """What each process says, in the order of the processes; all call it together."""
    own = np.frombuffer(text.encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.array(len(own))).max())
    said_PN = multihost_utils.process_allgather(np.pad(own, (0, longest - len(own))))  # P process, N byte
    return [bytes(said_N).rstrip(b"\0").decode() for said_N in said_PN]


def agree_with_others(process: Process, folder: Path, reads: Experiment | None = None) -> None:
    """Hold versions, data and clocks of all hosts against the first's; process 0 leaves the hosts' names.

    Raises:
        ExperimentError: they differ; all processes raise it.
    """
    here = facts_here(PACKAGES, reads if process.local == 0 else None)
    all_facts = [msgspec.json.decode(x, type=HostFacts) for x in exchange(msgspec.json.encode(here).decode())]
    remarks = require_agreement(all_facts)
    if process.is_first:
        leave_hosts(folder, all_facts)
        print(*remarks, sep="\n", end="\n" if remarks else "", file=sys.stderr, flush=True)


def is_consequence(error: BaseException) -> bool:
    """True if an error only says that another process went away, so that the cause lies elsewhere."""
    return any(sign in str(error).lower() for sign in _LOST)


def hosts_of(devices: list[jax.Device]) -> list[str]:
    """The name of each device's host."""
    if jax.process_count() == 1:
        return [socket.gethostname()] * len(devices)
    places = map(json.loads, exchange(json.dumps([socket.gethostname(), _here[-1].local])))
    names = host_names((name, local) for name, local in places)
    return [names[device.process_index] for device in devices]


def meet(what: str) -> None:
    """Wait for the other processes: they compile at different speeds, and a collective waits 30 s at most."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
