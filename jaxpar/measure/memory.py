"""Memory of a run on each device, and the threads of the host."""

import math
from typing import Any

import jax

from compare.contract.memory_profile import Class, DeviceMemory, MemoryProfile, Peak
from compare.contract.record import ON_HOST
from compare.system.facts import cores, process_memory
from jaxpar.comm.hosts import all_gather_numbers
from jaxpar.engine import Engine
from jaxpar.offload import HOST
from jaxpar.programs import TrainState

PLANNED = "XLA's buffer assignment of one step: argument + temp + output - alias"


def peak_memory(step: jax.stages.Compiled, devices: list[jax.Device]) -> tuple[list[int], str]:
    """Peak bytes per device, and their source: the allocator of a GPU, or `planned_memory`."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    statistics = [device.memory_stats() for device in local]
    if all(statistics):
        peaks = all_gather_numbers([s["peak_bytes_in_use"] for s in statistics if s])
        return peaks, "allocator's peak since the process began"
    if planned := planned_memory(step):
        return [planned] * len(devices), PLANNED
    return [], "unknown: neither the allocator nor XLA reports it"


def planned_memory(step: jax.stages.Compiled) -> int:
    """Bytes of XLA's buffer assignment for one step on each device; 0 if XLA does not report it."""
    analysis = step.memory_analysis()
    return _arguments_and_results(analysis) + analysis.temp_size_in_bytes if analysis else 0


def memory_profile(step: jax.stages.Compiled, *, parameters: int, optimizer: int) -> MemoryProfile | None:
    """Memory of a compiled step by class, equal on all devices; None if XLA does not report it.

    `parameters` and `optimizer` are the bytes of the state on a device.
    """
    analysis = step.memory_analysis()
    if analysis is None:
        return None
    sizes: dict[Class, int] = {
        "parameters": parameters,
        "optimizer": optimizer,
        "XLA's temporaries": analysis.temp_size_in_bytes,
        # Batch, scalars and metrics; in a ladder also gradients.
        "temporaries": _arguments_and_results(analysis) - parameters - optimizer,
    }
    return MemoryProfile(devices=[DeviceMemory(peak=Peak(bytes=sizes))], method=PLANNED)


def _arguments_and_results(analysis: Any) -> int:
    """Bytes of arguments and results. Donated arguments count once."""
    return analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def memory_in_use(device: jax.Device) -> int:
    """Bytes in use: of a GPU's allocator, or of the process, for all virtual devices together."""
    statistics = device.memory_stats()
    return statistics["bytes_in_use"] if statistics else process_memory()


def resident_bytes(tree: Any, devices: list[jax.Device], *, on_host: bool = False) -> list[int]:
    """Bytes of a tree's shards on each device, or with `on_host` in the host's memory for each device."""
    total = dict.fromkeys(devices, 0)
    for leaf in jax.tree.leaves(tree):
        if (leaf.sharding.memory_kind == HOST) == on_host:
            size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for device in leaf.sharding.device_set:
                total[device] += size
    return list(total.values())


def bytes_at_rest(engine: Engine, state: TrainState) -> dict[str, list[int]]:
    """Bytes between two steps on each device and on the host. Gradients are the accumulated ones."""

    def accumulated(w: jax.Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)

    devices = list(engine.mesh.devices.flat)
    gradients = jax.tree.map(accumulated, state.params, engine.shardings.accumulated)
    trees = {"parameters": state.params, "gradients": gradients, "optimizer": state.opt_state}
    resident = {name: resident_bytes(tree, devices) for name, tree in trees.items()}
    on_host = resident_bytes(state.opt_state, devices, on_host=True)
    return resident | ({ON_HOST: on_host} if any(on_host) else {})


def threads(devices: list[jax.Device]) -> str:
    """Threads that compute on the host, in words."""
    count, processes = len(devices), jax.process_count()
    driven = "in one process" if processes == 1 else f"in {processes} processes"
    if devices[0].platform != "cpu":
        return f"{count} devices {driven}"
    return f"{count} virtual devices {driven}, an XLA thread pool over {cores()} cores in each"
