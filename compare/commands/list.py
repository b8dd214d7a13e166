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


class Entry(Struct, frozen=True):
    """A name, and what it stands for."""

    name: str
    description: str
    facts: dict[str, str | int]
    """What else a reader chooses by."""


class List(Struct, frozen=True, kw_only=True):
    """Name every experiment, preset, fault, engine and lesson, a line each."""

    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self) -> int:
        """Print them. Returns 0."""
        everything = {
            "experiments": [_experiment(name, path) for name, path in named_experiments().items()],
            "presets": [
                Entry(name, of.description, {"devices": 1 if name == "single" else of.devices})
                for name, of in PRESETS.items()
            ],
            "faults": [Entry(name, of.description, {"caught_at": of.rung}) for name, of in FAULTS.items()],
            "engines": [
                Entry(name, of.decides, {"pipelines": ", ".join(of.layouts.schedules)})
                for name, of in STUDIED.items()
            ],
            "peers": [
                Entry(
                    name, of.decides, {"missing": of.pip_line if missing_package(of, sys.executable) else ""}
                )
                for name, of in PEERS.items()
            ],
            "lessons": [
                Entry(name, f"{of.title}, in all engines on one page", {"preset": of.preset})
                for name, of in LESSONS.items()
            ],
        }
        if self.json:
            print_json(everything)
            return 0
        for subject, entries in everything.items():
            rows = []
            for entry in entries:
                facts = [f"{fact:,}" if isinstance(fact, int) else fact for fact in entry.facts.values()]
                rows.append(Row(Text(entry.name), [*map(Text, facts), Text(entry.description)]))
            columns = [*entries[0].facts, ""]
            table = Table(name="", corner=subject, columns=columns, rows=rows, look="words")
            results_console().print(terminal_table(table))
        return 0


def _experiment(name: str, path: Path) -> Entry:
    """Its size, and the first sentence of its file's comment, or what stands before a colon there."""
    experiment = load(name)
    facts: dict[str, str | int] = {
        "parameters": parameter_count(experiment.model),
        "steps": experiment.train.max_iters,
        "dtype": experiment.precision.dtype,
        "devices": experiment.layout.devices,
    }
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    return Entry(name, re.split(r"[.:](?:\s|$)", " ".join(lines), maxsplit=1)[0], facts)
