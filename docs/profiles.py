"""`make profiles`: where the time of a step goes in each framework; docs/data/profiles.json.

    python docs/profiles.py jax-manual zero1 4        # one of CASES by its first words, printed and not kept

Each case is a process of its own, on an idle machine, over steps after the first ones; a figure is the
median over some profiles. `jax_operations` sums XLA's operations over all devices; one that waits for
other devices counts as long as it waits. `torch_operators` has rank 0's operators, each without those that it
calls. torch's engines of a layout compute the same: what one class costs both is common, and a floor under
the ratio of the two. So is what the same model costs on one device with a rank's share of the batch. Then
the same steps without a message: every collective returns at once, as in a silent twin; with a core for each
of the two ranks.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from compare.execute.launch import child_environment
from compare.host.disk import write_atomically
from compare.host.json_files import read_json
from compare.show.markdown import markdown_rows
from compare.spec.engines.registry import SIDES, side_of
from compare.spec.experiment import Experiment, edited, load
from compare.studies.presets import spread

PROFILES = Path(__file__).parent / "data" / "profiles.json"
NOT_YET = "Not measured yet: `make profiles` measures it."
SIZES = {6: {"block_size": 128}, 8: {"block_size": 128, "n_layer": 8, "n_head": 8}}
"""By layers, as in the benches of docs/performance.py: four stages of a pipeline share eight."""
TORCH = ("torch-manual", "torch-library")
JAX_CLASSES = {
    "linear layers": "products of linear layers",
    "attention": "products of attention",
    "elementwise": "elementwise work of the model",
    "optimizer": "norm, clipping and optimizer",
    "copies": "copies and fills",
    "collectives": "collectives, waiting included",
}
TORCH_CLASSES = {kind: JAX_CLASSES[kind] for kind in list(JAX_CLASSES)[:-1]} | {
    "attention": "attention",
    "communication": "sends, receives and reductions",
    "host": "all else: Python, dispatch, waiting",
}


class Case(NamedTuple):
    """What is profiled."""

    engine: str
    preset: str
    devices: int
    batch: int
    """Sequences of a step; of torch's one device, a rank's share."""
    layers: int = 6
    microbatches: int = 1
    """One device accumulates them: it does the work of all stages."""

    @property
    def experiment(self) -> Experiment:
        """The experiment, spread over its devices."""
        passes = self.microbatches if self.devices == 1 else 1
        batch = {"batch_size": self.batch // passes, "gradient_accumulation_steps": passes}
        sizes = {"model": SIZES[self.layers], "train": batch, "data": {"source": "synthetic"}}
        laid_out = spread(edited(load("baby-gpt"), sizes), self.preset, self.devices)
        return edited(laid_out, {"layout": {"microbatches": self.microbatches // passes}})


Cell = Callable[["Profile"], str]
CASES = (
    Case("jax-manual", "single", 1, 8),
    Case("jax-manual", "ddp", 4, 8),
    Case("jax-manual", "zero1", 4, 8),
    Case("jax-manual", "fsdp", 4, 8),
    Case("jax-manual", "tp", 2, 8),
    Case("jax-compiler", "zero1", 4, 8),
    Case("jax-manual", "single", 1, 16, 8),
    Case("jax-manual", "tp", 4, 16, 8),
    Case("jax-manual", "tp_sp", 4, 16, 8),
    Case("jax-manual", "single", 1, 16, 8, 16),
    Case("jax-manual", "pp", 4, 16, 8, 4),
    Case("jax-manual", "pp", 4, 16, 8, 16),
    Case("torch-manual", "single", 1, 2),
    *(Case(engine, preset, 2, 4) for preset in ("ddp", "zero1", "fsdp") for engine in TORCH),
    *(Case(engine, preset, 2, 2) for preset in ("tp", "tp_sp") for engine in TORCH),
    Case("torch-manual", "single", 1, 8, microbatches=8),
    *(Case(engine, "pp", 2, 8, microbatches=8) for engine in TORCH),
)


class Profile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of one case. Times are in milliseconds: of all devices of jaxpar, and of torchpar's rank 0."""

    engine: str
    preset: str
    devices: int
    layers: int = 6
    microbatches: int = 1
    wall_ms: float
    cpu_ms: float
    """Before the profiler was on."""
    silent_cpu_ms: float | None = None
    """Of torchpar, when no message is sent any more."""
    operations_ms: dict[str, float]
    """By class."""

    @property
    def is_jax(self) -> bool:
        """True if its times are of XLA's operations."""
        return side_of(self.engine).name == "jaxpar"

    @property
    def total_ms(self) -> float:
        """Of all operations."""
        return sum(self.operations_ms.values())


def read_profiles() -> list[Profile]:
    """What is stored; [] before the first `make profiles`."""
    return read_json(PROFILES, list[Profile]) if PROFILES.is_file() else []


def torch_table(*, pipelines: bool = False) -> str:
    """Where the time of a step of torchpar's engines goes, and what both have in common."""
    shown = [p for p in read_profiles() if not p.is_jax and (p.microbatches > 1) == pipelines]
    cells: dict[str, Cell] = {
        words: lambda p, kind=kind: f"{p.operations_ms[kind]:.0f}" for kind, words in TORCH_CLASSES.items()
    }
    cells["CPU time of a step, unprofiled"] = lambda p: f"{p.cpu_ms:.0f}"
    cells["CPU time without messages"] = lambda p: f"{p.silent_cpu_ms:.0f}"
    cells["wall time of a step, unprofiled"] = lambda p: f"{p.wall_ms:.0f}"
    return _table("ms of a rank in a step", shown, lambda p: f"`{p.engine}` {p.preset}", cells)


def jax_table(*, layers: int = 6) -> str:
    """Where the time of a step of jaxpar goes."""
    shown = [p for p in read_profiles() if p.is_jax and p.layers == layers]
    cells: dict[str, Cell] = {
        words: lambda p, kind=kind: f"{p.operations_ms[kind] / p.total_ms:.0%}"
        for kind, words in JAX_CLASSES.items()
    }
    cells["their sum, ms"] = lambda p: f"{p.total_ms:.0f}"
    cells["CPU time of a step, ms"] = lambda p: f"{p.cpu_ms:.0f}"
    cells["wall time of a step, ms"] = lambda p: f"{p.wall_ms:.0f}"
    return _table("of a step's operations", shown, lambda p: f"`{p.engine}` {p.preset}, {p.devices}", cells)


def _table(corner: str, shown: list[Profile], head: Cell, cells: dict[str, Cell]) -> str:
    """A column for each profile."""
    if not shown:
        return NOT_YET
    more = (f", {p.microbatches} microbatches" if p.microbatches > 1 else "" for p in shown)
    header = [corner, *(head(p) + text for p, text in zip(shown, more, strict=True))]
    return markdown_rows(header, [[words, *map(cell, shown)] for words, cell in cells.items()])


def measure(case: Case) -> Profile:
    """Train some steps in this process, or in ranks that it starts."""
    if side_of(case.engine).name == "jaxpar":
        from jax_operations import measured
    else:
        from torch_operators import measured
    fields = case._asdict()
    del fields["batch"]
    return Profile(**fields, **measured(case))


def main(words: list[str]) -> int:
    """Measure one case and print it; or all of them, each in a process of its own, and keep them."""
    chosen = [case for case in CASES if [*map(str, case)][: len(words)] == words]
    if words and len(chosen) != 1:
        print(f"{' '.join(words)}: {len(chosen)} cases begin so: give one of CASES", file=sys.stderr)
        return 2
    if words:
        print(msgspec.json.encode(measure(chosen[0])).decode())
        return 0
    found = []
    for case in CASES:
        command = [sys.executable, __file__, *map(str, case)]
        # memory in huge pages, as in a run of jaxpar
        environment = child_environment(SIDES["jaxpar"], "cpu") if case.engine not in TORCH else None
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        found.append(msgspec.json.decode(done.stdout.splitlines()[-1], type=Profile))
        print(found[-1], file=sys.stderr, flush=True)
    write_atomically(PROFILES, msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
