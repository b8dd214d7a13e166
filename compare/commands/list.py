"""`shardpair list`: what there is to name on the command line, a line each."""

import re
import sys
from pathlib import Path

from msgspec import Struct

from compare.execute.packages import missing_package
from compare.numerics.parameters import parameter_count
from compare.show.findings import Row, Table, Text
from compare.show.terminal import terminal_table
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import load, named_experiments
from compare.studies.faults import FAULTS
from compare.studies.lessons import LESSONS
from compare.studies.presets import PRESETS
from compare.terminal import print_json, results_console


class List(Struct, frozen=True, kw_only=True):
    """Name every experiment, preset, fault, engine and lesson, a line each."""

    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self) -> int:
        """Print them. Returns 0."""
        lessons = {name: f"{of.title}, in all engines on one page" for name, of in LESSONS.items()}
        missing = {name: missing_package(peer, sys.executable) for name, peer in PEERS.items()}
        subjects: dict[str, tuple[list[str], list[tuple[str | int, ...]]]] = {
            "experiments": (
                ["parameters", "steps", "dtype", "devices"],
                [_experiment(name, path) for name, path in named_experiments().items()],
            ),
            "presets": (
                ["devices"],
                [
                    (name, 1 if name == "single" else of.devices, of.description)
                    for name, of in PRESETS.items()
                ],
            ),
            "faults": (["caught_at"], [(name, of.rung, of.description) for name, of in FAULTS.items()]),
            "engines": (
                ["pipelines"],
                [(name, ", ".join(of.layouts.schedules), of.decides) for name, of in STUDIED.items()],
            ),
            "peers": (
                ["missing"],
                [(name, of.pip_line if missing[name] else "", of.decides) for name, of in PEERS.items()],
            ),
            "lessons": (["preset"], [(name, of.preset, lessons[name]) for name, of in LESSONS.items()]),
        }
        if self.json:
            keys = {subject: ["name", *facts, "description"] for subject, (facts, _) in subjects.items()}
            print_json(
                {
                    subject: [dict(zip(keys[subject], row, strict=True)) for row in rows]
                    for subject, (_, rows) in subjects.items()
                }
            )
            return 0
        for subject, (facts, rows) in subjects.items():
            texts = [[Text(f"{of:,}" if isinstance(of, int) else of) for of in row] for row in rows]
            cells = [Row(name, more) for name, *more in texts]
            table = Table(name="", corner=subject, columns=[*facts, ""], rows=cells, look="words")
            results_console().print(terminal_table(table))
        return 0


def _experiment(name: str, path: Path) -> tuple[str | int, ...]:
    """Its size, and the first sentence of its file's comment, or what stands before a colon there."""
    experiment = load(name)
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    about = re.split(r"[.:](?:\s|$)", " ".join(lines), maxsplit=1)[0]
    size, train = parameter_count(experiment.model), experiment.train
    return name, size, train.max_iters, experiment.precision.dtype, experiment.layout.devices, about
