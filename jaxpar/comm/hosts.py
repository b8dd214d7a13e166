"""Processes of JAX on several hosts: joining them, and moving arrays between NumPy and all of their devices.

Of several, each places the part of an array that its own devices hold, and XLA gathers what it fetches.
"""

import json
import re
import socket
from functools import partial
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from compare.side.host_facts import HostFacts, agree, facts_here, host_names
from compare.side.processes import Process, address_towards
from compare.spec.experiment import Experiment
from compare.system.facts import MissingDevicesError
from jaxpar.configuration import PACKAGES

_here: list[Process] = []  # which of the processes this one is, once it has joined them
LATER_S = 60.0
"""JAX aborts, without a word of Python's, when it misses a process: so much later than our own time-out."""
_LOST = re.compile("gloo|connection (closed|reset) by peer|coordination service|socket closed", re.IGNORECASE)


def join(process: Process, *, devices: int, platform: str, timeout_s: float) -> None:
    """Become one of the processes of a run, which drive as many devices each: see `join_devices`.

    Raises ExperimentError: there is no host where they are to meet.
    """
    if devices % process.count:
        raise MissingDevicesError(
            f"the layout needs {devices} devices, which {process.count} processes do not "
            "divide: start another number of them"
        )
    address_towards(process.host, process.port)
    _here.append(process)
    share = devices // process.count
    # Told by SLURM, JAX would give each task one GPU: a task here drives all of its share.
    local = range(process.local * share, (process.local + 1) * share) if platform == "gpu" else None
    # Its handler of SIGTERM would take the place of ours, and SLURM's scancel would end nothing for 30 s.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        f"{process.host}:{process.port}",
        num_processes=process.count,
        process_id=process.number,
        local_device_ids=local,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout_s + LATER_S),
        heartbeat_timeout_seconds=int(timeout_s + LATER_S),
    )


def spread(tree: Any, shardings: Any) -> Any:
    """NumPy arrays, the same in every process, over the devices; `shardings` is one or a tree of them."""
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
    """A tree of full arrays as NumPy in every process; all processes call it together."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    gather = partial(multihost_utils.process_allgather, tiled=True)
    return jax.tree.map(lambda x: np.asarray(gather(x) if isinstance(x, jax.Array) else x), tree)


def gathered(values: list[Any]) -> list[Any]:
    """Numbers of each process, as many in each, in the order of the processes."""
    if jax.process_count() == 1:
        return values
    return multihost_utils.process_allgather(np.asarray(values)).reshape(-1).tolist()


def exchange(text: str) -> list[str]:
    """The texts of all processes (P), in their order; all call it together."""
    if jax.process_count() == 1:
        return [text]
    bytes_N = np.frombuffer(text.encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.array(len(bytes_N))).max())
    bytes_PN = multihost_utils.process_allgather(np.pad(bytes_N, (0, longest - len(bytes_N))))
    return [bytes(bytes_N).rstrip(b"\0").decode() for bytes_N in bytes_PN]


def agree_with_others(process: Process, reads: Experiment | None = None) -> None:
    """Refuse, in all processes, hosts of other versions or data."""
    here = facts_here("jaxpar", PACKAGES, reads if process.local == 0 else None)
    agree([msgspec.json.decode(x, type=HostFacts) for x in exchange(msgspec.json.encode(here).decode())])


def is_consequence(error: BaseException) -> bool:
    """True if an error only says that another process went away, so that the cause lies elsewhere."""
    return bool(_LOST.search(str(error)))


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
