"""This machine as one to plan for: its products, its memory and its links, measured in about a minute.

Devices of a CPU share its cores: what is measured is what one of them has while all are at work.
"""

import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compare.contract.collective_bench import IMPLEMENTATIONS, OURS
from compare.contract.communication import ring_wire_bytes
from compare.execute.ceiling import measure_ceiling
from compare.execute.load import busy_cores, require_idle
from compare.execute.machine import memory_bytes
from compare.host.facts import cores
from compare.plan.machine import LinkSpeed, Machine, read_machine
from compare.spec.engines.registry import side_of
from compare.spec.experiment import MAX_CPU_DEVICES, Experiment, ExperimentError
from compare.studies.collective_runs import Order, requests_of, run_requests, sizes_between

HERE = "here"
SIZES = (64, 128, 256, 512, 1024)
"""Rows and columns of the products that are timed."""
COPIED = 64 * 2**20
"""Bytes of the vector that is copied to time the memory: larger than caches."""
ROW_S = 0.1


def measure_here(
    engine: str,
    experiment: Experiment,
    devices: int,
    *,
    folder: Path,
    pythons: Mapping[str, str],
    anyway: bool,
    quiet: bool,
) -> Machine:
    """Measure this machine for one engine.

    Args:
        engine: whose side multiplies and communicates.
        experiment: its dtype is that of the products.
        devices: that share the cores.
        folder: for the collectives' rows while they are measured; it must not exist.
        pythons: side -> its interpreter.
        anyway: on a busy machine, too.
        quiet: no progress on stderr.

    Raises:
        EnvironmentMissing: it is busy, or the side cannot say.
        Interrupted: Ctrl-C.
    """
    busy, side = busy_cores(), side_of(engine)
    require_idle(busy, anyway=anyway)
    dtype = experiment.precision.product_dtype
    threads = 1 if side.one_process_a_device else cores()
    share = min(threads, cores() / devices) / threads  # of these threads, that a device has
    found = measure_ceiling(side.name, "cpu", dtype, pythons[side.name], threads=threads, sizes=SIZES)
    best = max(found.by_size.values())
    return Machine(
        name=f"{HERE}x{devices}",
        devices=devices,
        platform="cpu",
        devices_inside=devices,
        memory_bytes=memory_bytes() / devices,
        memory_bytes_per_s=_copied_per_s() * min(1.0, cores() / devices),
        peak={dtype: best * share},
        sustained={dtype: best * share},
        products=[(2.0 * size**3, rate / best) for size, rate in sorted(found.by_size.items())],
        inside=(link := _link(side.name, devices, folder, pythons, busy, quiet)),
        across=link,
    )


def machine_of(text: str, devices: int, engine: str, experiment: Experiment, **how: Any) -> Machine:
    """The machine that a flag names: this one, measured now, or that of a file.

    Args:
        text: here, or as of `read_machine`, with so many devices.
        devices: of this machine.
        engine, experiment: as of `measure_here`.
        how: its other arguments, but for the folder.

    Raises:
        ExperimentError: no such machine, or it has another number of devices.
        EnvironmentMissing, Interrupted: as of `measure_here`.
    """
    if text != HERE:
        machine = read_machine(text)
        if machine.devices != devices:
            raise ExperimentError(
                f"--machine {text} has {machine.devices} devices, --devices {devices}: make them one"
            )
        return machine
    if not 1 <= devices <= MAX_CPU_DEVICES:
        raise ExperimentError(f"--devices {devices}: give between 1 and {MAX_CPU_DEVICES}")
    with tempfile.TemporaryDirectory() as folder:
        return measure_here(engine, experiment, devices, folder=Path(folder) / "collectives", **how)


def _copied_per_s() -> float:
    """Bytes/s that one thread reads and writes: the best of a few copies."""
    source, target, times = np.ones(COPIED // 8), np.empty(COPIED // 8), []
    for _ in range(5):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return 2 * COPIED / min(times)


def _link(
    side: str, devices: int, folder: Path, pythons: Mapping[str, str], busy: float, quiet: bool
) -> LinkSpeed:
    """Latency and bandwidth of an all-reduce over all devices; free on one device, which has no link."""
    if devices == 1:
        return LinkSpeed(bytes_per_s=1e30, latency_s=0.0)
    ways = tuple(name for name, one in IMPLEMENTATIONS.items() if one.side == side and name in (OURS, "xla"))
    order = Order(
        kinds=("all_reduce",),
        implementations=ways,
        sizes=sizes_between(1024, 2**22, 8),
        ranks=(devices,),
        row_s=ROW_S,
    )
    requests, left_out = requests_of(order)
    how = {"run_dir": str(folder), "busy": busy, "pythons": pythons, "quiet": quiet}
    bench, _ = run_requests(requests, left_out, command="", **how)
    (fit,) = bench.fits
    wire = ring_wire_bytes("all_reduce", 2**20, devices) / 2**20
    rate = min(fit.bytes_per_s * wire, 1e30)
    return LinkSpeed(bytes_per_s=rate, latency_s=fit.latency_us / 1e6 / math.ceil(math.log2(devices)))
