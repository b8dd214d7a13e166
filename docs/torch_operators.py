"""Where the time of a step of torchpar goes: rank 0's operators by class; for docs/profiles.py."""

import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from profiles import TORCH_CLASSES, Case

STEPS, ROUNDS = 3, 5
_BEGINNINGS = {
    "attention": "scaled_dot_product",
    "linear layers": "mm addmm bmm baddbmm linear",
    "optimizer": "fused_adam linalg_vector_norm foreach Optimizer",
    "copies": "copy cat clone fill zero stack to_copy contiguous split_with",
    "communication": "c10d:: gloo: record_param_comms",
    "elementwise": "gelu native_layer_norm add mul div sub sum embedding log_softmax softmax nll exp amax "
    "max masked_fill gather scatter sqrt rsqrt mean neg where arange",
}
"""Of operators' names, without aten:: and leading _; the first class that fits."""


def class_of(operator: str) -> str:
    """The class of an operator, by its name: `aten::mm` is a product."""
    name = operator.removeprefix("aten::").lstrip("_")
    for kind, beginnings in _BEGINNINGS.items():
        if name.startswith(tuple(beginnings.split())):
            return kind
    return "host"


def measured(case: Case) -> dict[str, Any]:
    """Figures of a `Profile`: some steps, each rank in a process of its own."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (case, Path(folder)), nprocs=case.devices)
        return msgspec.json.decode((Path(folder) / "profile.json").read_bytes())


def _rank(rank: int, case: Case, folder: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    from compare.contract.request import Request
    from compare.host.facts import cpu_seconds
    from compare.numerics.stream import arrays_of_step
    from torchpar import train
    from torchpar.comm.rank import Heartbeat, Rank
    from torchpar.comm.silence import fall_silent

    ranks, experiment = case.devices, case.experiment
    request = Request(engine=case.engine, experiment=experiment, silent=ranks > 1)
    place = Rank(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        heartbeat=Heartbeat([0] * Heartbeat.cells_for(ranks)),
        rendezvous=folder / "rendezvous",
    )
    run = train.set_up(request, train.join_mesh(place, request), place)

    def steps(first: int) -> tuple[float, float]:
        begun, cpu_begun = time.perf_counter(), cpu_seconds()
        for number in range(first, first + STEPS):
            batch = train.to_device(run, arrays_of_step(run.corpus, experiment, number))
            train.compute_gradients(run, batch)
            train.optimizer_step(run.parallel, experiment.optimizer, number, waits=False)
        return (time.perf_counter() - begun) * 1e3 / STEPS, (cpu_seconds() - cpu_begun) * 1e3 / STEPS

    def typical(first: int) -> tuple[float, float]:
        steps(first)
        walls, cpus = zip(*(steps(first + STEPS * turn) for turn in range(1, ROUNDS + 1)), strict=True)
        return median(walls), median(cpus)

    wall_ms, cpu_ms = typical(0)
    found = []
    for turn in range(ROUNDS + 1):
        with profile(activities=[ProfilerActivity.CPU]) as traced:
            profiled_ms, _ = steps(STEPS * (ROUNDS + 1 + turn))
        found.append(Counter(dict.fromkeys(TORCH_CLASSES, 0.0)))
        for event in traced.key_averages():
            found[-1][class_of(event.key)] += event.self_cpu_time_total / 1e3 / STEPS
        found[-1]["host"] = profiled_ms - sum(found[-1][kind] for kind in _BEGINNINGS)
    del found[0]  # it started the profiler itself
    if ranks > 1:
        fall_silent(run.mesh.axes, run.mesh.device, run.parallel.module)
    _, silent_cpu_ms = typical(STEPS * 2 * (ROUNDS + 1))
    if rank:
        return
    figures = {
        "wall_ms": wall_ms,
        "cpu_ms": cpu_ms,
        "silent_cpu_ms": silent_cpu_ms,
        "operations_ms": {kind: median(one[kind] for one in found) for kind in TORCH_CLASSES},
    }
    (folder / "profile.json").write_bytes(msgspec.json.encode(figures))
