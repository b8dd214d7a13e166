"""This machine, or the hosts of an allocation, to plan for: products, memory and links, in about a minute.

Devices of a CPU share its cores: what is measured is what one of them has while all are at work.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from compare.contract.ceiling import CeilingRequest
from compare.contract.collective_bench import OURS, CollectiveCase, CollectiveRequest
from compare.contract.communication import ring_wire_bytes
from compare.execute.ask import measure_ceiling
from compare.execute.hosts import HERE as ONE_HOST
from compare.execute.hosts import Hosts
from compare.execute.launch import EngineError
from compare.execute.load import busy_cores, require_idle
from compare.execute.machine import memory_bytes
from compare.execute.paths import RUNS
from compare.host.facts import cores
from compare.judge.collective_fit import fits_of
from compare.plan.machine import LinkSpeed, Machine
from compare.spec.engines.registry import TORCH, side_of
from compare.spec.experiment import MAX_CPU_DEVICES, Experiment, ExperimentError, Layout
from compare.studies.collectives import sizes_between, time_collectives

HERE = "here"
SIZES = (64, 128, 256, 512, 1024)
"""Rows and columns of the products that are timed."""
COPIED = 64 * 2**20
"""Bytes of the vector that is copied to time the memory: larger than caches."""


def machine_here(
    engine: str,
    experiment: Experiment,
    devices: int,
    *,
    pythons: Mapping[str, str],
    anyway: bool,
    hosts: Hosts = ONE_HOST,
) -> Machine:
    """Measure this machine for one engine's side; of several hosts all are taken to be like it.

    `anyway` measures a busy machine, too. Raises ExperimentError, EnvironmentMissing, EngineError.
    """
    if not 1 <= devices <= MAX_CPU_DEVICES:
        raise ExperimentError(f"--devices {devices}: give between 1 and {MAX_CPU_DEVICES}")
    side = side_of(engine)
    require_idle(busy_cores(), anyway=anyway)
    hosts.require(Layout(dp_replicate=devices))
    inside = devices // hosts.count
    sharing = devices if hosts.launcher == "local" else inside  # hosts of a test share this machine's cores
    dtype = experiment.precision.product_dtype
    threads = 1 if side.one_process_a_device else cores()
    share = min(threads, cores() / sharing) / threads  # of these threads, that a device has
    request = CeilingRequest(dtype=dtype, threads=threads, sizes=SIZES)
    ceiling = measure_ceiling(side.name, pythons[side.name], request)
    best = max(ceiling.by_size.values())

    def link(ranks: int, over: Hosts, sharing_it: int = 1) -> LinkSpeed:
        """Of an all-reduce over so many ranks; free on one, which has no link."""
        if ranks == 1:
            return LinkSpeed(bytes_per_s=1e30)
        way = OURS if side.name == TORCH.name else "xla"
        cases = tuple(CollectiveCase("all_reduce", size) for size in sizes_between(1024, 2**22))
        request = CollectiveRequest(implementations=(way,), cases=cases, ranks=ranks)
        if over.several:  # they share the folder of the results, and not /tmp
            RUNS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=RUNS if over.several else None) as folder:
            place = Path(folder) / "all_reduce"
            rows = time_collectives(request, place, pythons=pythons, hosts=over).rows
        if any(row.wrong for row in rows):
            raise EngineError(f"all_reduce: wrong results of {way}", exit_code=1)
        (fit,) = fits_of(rows)
        rate = (fit.bandwidth_gb_s or 1e21) * 1e9 * ring_wire_bytes("all_reduce", 2**20, ranks) / 2**20
        return LinkSpeed(bytes_per_s=min(rate, 1e30) / sharing_it)

    within = link(inside, ONE_HOST)
    return Machine(
        name=f"{HERE}x{devices}",
        devices=devices,
        platform="cpu",
        devices_inside=inside,
        memory_bytes=memory_bytes() / sharing,
        memory_bytes_per_s=_copied_per_s() * min(1.0, cores() / sharing),
        peak={dtype: best * share},
        sustained={dtype: best * share},
        products=[(2.0 * size**3, rate / best) for size, rate in sorted(ceiling.by_size.items())],
        inside=within,
        # A device of each host is timed; all of a host share its link.
        across=link(hosts.count, hosts, inside) if hosts.count > 1 else within,
    )


def _copied_per_s() -> float:
    """Bytes/s that one thread reads and writes: the best of a few copies."""
    source, target, times = np.ones(COPIED // 8), np.empty(COPIED // 8), []
    for _ in range(5):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return 2 * COPIED / min(times)
