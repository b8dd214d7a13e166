"""`make profiles`, for torch: where the time of a step of its engines goes; docs/torch_profiles.json.

    python docs/torch_profiles.py torch-manual tp_sp        # one of them, printed and not kept
    python docs/torch_profiles.py torch-manual pp 8         # with 8 microbatches

Times are of rank 0's operators, each without those that it calls, from torch.profiler, over some steps after
the first ones, each the median over some profiles. Both engines of a layout compute the same: what one
operator class costs both is common, and a floor under the ratio of the two. So is what the same model costs
on one device with a rank's share of the batch. Then the same steps without a message: every collective
returns at once, as in a silent twin. On an idle machine with a core for each of the two ranks.
"""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

PROFILES = Path(__file__).parent / "torch_profiles.json"
RANKS = 2
BATCH = {"single": 2, "ddp": 4, "zero1": 4, "fsdp": 4, "tp": 2, "tp_sp": 2, "pp": 8}
"""Sequences of a step by layout, as in the benches of docs/performance.py; of one device, a rank's share."""
PIPELINE = 8
"""Microbatches of one sequence. One device that accumulates as many does the work of both stages."""
ENGINES = ("torch-manual", "torch-library")
CASES = (
    ("torch-manual", "single", 1),
    *((engine, preset, 1) for preset in ("ddp", "zero1", "fsdp", "tp", "tp_sp") for engine in ENGINES),
    ("torch-manual", "single", PIPELINE),
    *((engine, "pp", PIPELINE) for engine in ENGINES),
)
"""Engine, preset and microbatches."""
CLASSES = {
    "linear layers": "products of linear layers",
    "attention": "attention",
    "elementwise": "elementwise work of the model",
    "optimizer": "norm, clipping and optimizer",
    "copies": "copies and fills",
    "communication": "sends, receives and reductions",
    "host": "all else: Python, dispatch, waiting",
}
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


class TorchProfile(Struct, frozen=True, kw_only=True):
    """One step of one case. Times are in milliseconds, of rank 0."""

    engine: str
    preset: str
    microbatches: int = 1
    wall_ms: float
    cpu_ms: float
    """Of one rank, before the profiler was on."""
    silent_cpu_ms: float
    """Of one rank, when no message is sent any more."""
    operations_ms: dict[str, float]
    """By `CLASSES`."""


def read_torch_profiles() -> list[TorchProfile]:
    """What is stored; [] before the first `make profiles`."""
    stored = PROFILES.read_bytes() if PROFILES.is_file() else b"[]"
    return msgspec.json.decode(stored, type=list[TorchProfile])


def class_of(operator: str) -> str:
    """The class of an operator, by its name: `aten::mm` is a product."""
    name = operator.removeprefix("aten::").lstrip("_")
    for kind, beginnings in _BEGINNINGS.items():
        if name.startswith(tuple(beginnings.split())):
            return kind
    return "host"


def ranks_of(preset: str) -> int:
    """How many processes train."""
    return 1 if preset == "single" else RANKS


def measure(engine: str, preset: str, microbatches: int = 1) -> TorchProfile:
    """Train some steps, each rank in a process of its own."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _rank, (engine, preset, microbatches, Path(folder)), nprocs=ranks_of(preset)
        )
        return msgspec.json.decode((Path(folder) / "profile.json").read_bytes(), type=TorchProfile)


def _rank(rank: int, engine: str, preset: str, microbatches: int, folder: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    from compare.contract.request import Request
    from compare.host.facts import cpu_seconds
    from compare.numerics.stream import arrays_of_step
    from compare.spec.experiment import edited, load
    from compare.studies.presets import spread
    from torchpar import train
    from torchpar.comm.rank import Heartbeat, Rank
    from torchpar.comm.silence import fall_silent

    ranks = ranks_of(preset)
    passes = microbatches if ranks == 1 else 1
    batch = {"batch_size": 1 if passes > 1 else BATCH[preset], "gradient_accumulation_steps": passes}
    sizes = {"model": {"block_size": 128}, "train": batch, "data": {"source": "synthetic"}}
    experiment = spread(edited(load("baby-gpt"), sizes), preset, ranks)
    experiment = edited(experiment, {"layout": {"microbatches": microbatches // passes}})
    request = Request(engine=engine, experiment=experiment, silent=ranks > 1)
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
        found.append(Counter(dict.fromkeys(CLASSES, 0.0)))
        for event in traced.key_averages():
            found[-1][class_of(event.key)] += event.self_cpu_time_total / 1e3 / STEPS
        found[-1]["host"] = profiled_ms - sum(found[-1][kind] for kind in _BEGINNINGS)
    del found[0]  # it started the profiler itself
    if ranks > 1:
        fall_silent(run.mesh.axes, run.mesh.device, run.parallel.module)
    _, silent_cpu_ms = typical(STEPS * 2 * (ROUNDS + 1))
    if rank:
        return
    one = TorchProfile(
        engine=engine,
        preset=preset,
        microbatches=microbatches,
        wall_ms=wall_ms,
        cpu_ms=cpu_ms,
        silent_cpu_ms=silent_cpu_ms,
        operations_ms={kind: median(one[kind] for one in found) for kind in CLASSES},
    )
    (folder / "profile.json").write_bytes(msgspec.json.encode(one))


def main(arguments: list[str]) -> None:
    """Measure one case and print it, or all of them, each in a process of its own, and keep them."""
    if arguments:
        engine, preset, *numbers = arguments
        print(msgspec.json.encode(measure(engine, preset, *map(int, numbers))).decode())
        return
    found = []
    for case in CASES:
        command = [sys.executable, __file__, *map(str, case)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(msgspec.json.decode(done.stdout.splitlines()[-1], type=TorchProfile))
        print(found[-1], file=sys.stderr, flush=True)
    PROFILES.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
