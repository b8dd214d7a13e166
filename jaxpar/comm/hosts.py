"""Several processes of JAX, on one host or more: join them, move arrays, compare hosts.

Each process drives some of the devices. It puts the shards of an array on its own devices. To read an array,
XLA gathers it from the devices of all processes.
"""

import json
import os
import re
import socket
from functools import partial
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from compare.side.host_facts import HostFacts, agree, facts_here, host_names
from compare.side.processes import Process, address_towards, find_process
from compare.spec.experiment import Experiment
from compare.system.facts import MissingDevicesError
from jaxpar import PACKAGES

LATER_S = 60.0
"""JAX aborts without a Python error if a process is missing. So it waits longer than our own time-out."""
_LOST = re.compile("gloo|connection (closed|reset) by peer|coordination service|socket closed", re.IGNORECASE)


def join(process: Process, *, devices: int, platform: str, timeout_s: float) -> None:
    """Join the processes of a run. Each process drives an equal number of devices (`join_devices`).

    Raises MissingDevicesError: the processes do not divide the devices; ExperimentError: no host or port of
    process 0.
    """
    if devices % process.count:
        raise MissingDevicesError(
            f"the layout needs {devices} devices, which {process.count} processes do not "
            "divide: start another number of them"
        )
    address_towards(process.host, process.port)
    share = devices // process.count
    # Under SLURM, JAX would give each task one GPU; here a task drives all of its share.
    local = range(process.local * share, (process.local + 1) * share) if platform == "gpu" else None
    # JAX's handler of SIGTERM would replace ours, and SLURM's scancel would end nothing for 30 s.
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


def put_sharded(tree: Any, shardings: Any) -> Any:
    """Put NumPy arrays, equal in all processes, on the devices. `shardings` is a tree like `tree`."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        # device_put would compare the values of all processes, each time.
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree, shardings)


def to_host(tree: Any) -> Any:
    """Full arrays as NumPy, in every process. All processes call it together."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    gather = partial(multihost_utils.process_allgather, tiled=True)
    return jax.tree.map(lambda x: np.asarray(gather(x) if isinstance(x, jax.Array) else x), tree)


def all_gather_numbers(values: list[Any]) -> list[Any]:
    """The numbers of all processes, equally many of each, in the order of the processes."""
    if jax.process_count() == 1:
        return values
    return multihost_utils.process_allgather(np.asarray(values)).reshape(-1).tolist()


def all_gather_texts(text: str) -> list[str]:
    """The texts of all processes (P), in their order. All processes call it together."""
    if jax.process_count() == 1:
        return [text]
    bytes_N = np.frombuffer(text.encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.array(len(bytes_N))).max())
    bytes_PN = multihost_utils.process_allgather(np.pad(bytes_N, (0, longest - len(bytes_N))))
    return [bytes(bytes_N).rstrip(b"\0").decode() for bytes_N in bytes_PN]


def barrier(name: str) -> None:
    """Wait for the other processes. They compile at different speeds, and a collective waits 30 s at most."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agree_with_others(process: Process, reads: Experiment | None = None) -> None:
    """Reject hosts with different versions or data, in all processes."""
    here = facts_here("jaxpar", PACKAGES, reads if process.local == 0 else None)
    texts = all_gather_texts(msgspec.json.encode(here).decode())
    agree([msgspec.json.decode(text, type=HostFacts) for text in texts])


def is_consequence(error: BaseException) -> bool:
    """True if an error reports only that another process has ended."""
    return bool(_LOST.search(str(error)))


def hosts_of(devices: list[jax.Device]) -> list[str]:
    """The name of each device's host."""
    process = find_process(os.environ)
    if process is None:
        return [socket.gethostname()] * len(devices)
    places = map(json.loads, all_gather_texts(json.dumps([socket.gethostname(), process.local])))
    names = host_names((name, local) for name, local in places)
    return [names[device.process_index] for device in devices]
