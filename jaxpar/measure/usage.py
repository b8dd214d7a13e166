"""Memory that a run needs and keeps on each device, and what computes on the host."""

import math
from typing import Any

import jax

from compare.contract.host.facts import cores

PACKAGES = ("numpy", "jax", "jaxlib", "flax", "optax")


def peak_memory(step: jax.stages.Compiled, devices: list[jax.Device]) -> tuple[list[int], str]:
    """Peak bytes per device, and how they were obtained.

    A GPU's allocator keeps count. A CPU's does not: there it is what XLA's buffer assignment gives one
    step, which covers arguments, temporaries and outputs, donated buffers counted once.
    """
    statistics = [device.memory_stats() for device in devices]
    if all(statistics):
        return [s["peak_bytes_in_use"] for s in statistics if s], "allocator's peak since the process began"
    analysis = step.memory_analysis()
    if analysis is None:
        return [], "unknown: neither the allocator nor XLA tells"
    planned = (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    return [planned] * len(devices), "XLA's buffer assignment of one step: argument + temp + output - alias"


def resident_bytes(tree: Any, devices: list[jax.Device]) -> list[int]:
    """Bytes of a tree's shards on each device; leaves have shape, dtype and sharding."""
    total = dict.fromkeys(devices, 0)
    for leaf in jax.tree.leaves(tree):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for device in leaf.sharding.device_set:
            total[device] += size
    return list(total.values())


def threads(devices: list[jax.Device]) -> str:
    """Threads that compute on the host, in words."""
    if devices[0].platform != "cpu":
        return f"{len(devices)} devices driven by one process"
    return f"{len(devices)} virtual devices in one process, one XLA thread pool over {cores()} cores"
