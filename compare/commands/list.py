"""`shardpair list`: what there is to name on the command line, a line each."""

import re
import sys
from pathlib import Path

from msgspec import Struct
from rich import box
from rich.table import Table

from compare.execute.packages import missing_package
from compare.numerics.parameters import parameter_count
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import Experiment, Layout, load, named_experiments
from compare.studies.faults import FAULTS
from compare.studies.lessons import LESSONS
from compare.studies.presets import PRESETS, preset_layout
from compare.terminal import print_json, results_console


class Entry(Struct, frozen=True, kw_only=True):
    """One name, and what it stands for."""

    name: str
    description: str
    facts: dict[str, str | int]
    """What else a reader chooses by."""


class List(Struct, frozen=True, kw_only=True):
    """Name every experiment, preset, fault, engine and lesson, a line each.

    Try:
      shardpair list
      shardpair list --json
    """

    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self, default: Experiment) -> int:
        """Print them. Returns 0."""
        everything = {
            "experiments": experiments(),
            "presets": presets(),
            "faults": faults(),
            "engines": engines(),
            "peers": peers(),
            "lessons": lessons(),
        }
        if self.json:
            print_json(everything)
            return 0
        console = results_console()
        for kind, entries in everything.items():
            console.print(_table(kind, entries))
        return 0


def experiments() -> list[Entry]:
    """Those that ship with the package, with their sizes."""
    entries = []
    for name, path in named_experiments().items():
        experiment = load(name)
        facts: dict[str, str | int] = {
            "parameters": parameter_count(experiment.model),
            "steps": experiment.train.max_iters,
            "dtype": experiment.precision.dtype,
            "devices": experiment.layout.devices,
        }
        entries.append(Entry(name=name, description=_first_sentence(path), facts=facts))
    return entries


def presets() -> list[Entry]:
    """Layouts by name, with the devices that the parity matrix takes for each."""
    return [
        Entry(
            name=name,
            description=preset.description,
            facts={"matrix_devices": preset_layout(Layout(), name, preset.devices).devices},
        )
        for name, preset in PRESETS.items()
    ]


def faults() -> list[Entry]:
    """Mistakes that can be planted, with the rung that catches each."""
    return [
        Entry(name=fault.name, description=fault.description, facts={"caught_at": fault.rung})
        for fault in FAULTS.values()
    ]


def engines() -> list[Entry]:
    """The engines, with the pipeline schedules that each has."""
    return [
        Entry(
            name=engine.name,
            description=engine.decides,
            facts={"pipelines": ", ".join(engine.layouts.schedules)},
        )
        for engine in STUDIED.values()
    ]


def peers() -> list[Entry]:
    """What others use, to be run beside the engines (`--engines`), and what is missing here for it."""
    return [
        Entry(
            name=peer.name,
            description=peer.decides,
            facts={"missing": peer.pip_line if missing_package(peer, sys.executable) else ""},
        )
        for peer in PEERS.values()
    ]


def lessons() -> list[Entry]:
    """The rows of the grid (`shardpair lesson`), with the layout that each is shown under."""
    return [
        Entry(
            name=name,
            description=f"{lesson.title}, in all engines on one page",
            facts={"preset": lesson.preset, "devices": lesson.devices},
        )
        for name, lesson in LESSONS.items()
    ]


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment that an experiment begins with, or what stands before its colon."""
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    return re.split(r"[.:](?:\s|$)", " ".join(lines), maxsplit=1)[0]


def _table(kind: str, entries: list[Entry]) -> Table:
    facts = list(entries[0].facts)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(kind.replace("_", " "), no_wrap=True)
    for fact in facts:
        numbers = isinstance(entries[0].facts[fact], int)
        table.add_column(fact.replace("_", " "), justify="right" if numbers else "left", no_wrap=True)
    table.add_column("")
    for entry in entries:
        values = (entry.facts[fact] for fact in facts)
        cells = (f"{value:,}" if isinstance(value, int) else value for value in values)
        table.add_row(entry.name, *cells, entry.description)
    return table
