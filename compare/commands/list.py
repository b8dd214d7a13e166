"""`shardpair list`: what there is to name on the command line, a line each."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from compare.execute.packages import missing_package
from compare.numerics.parameters import parameter_count
from compare.show.findings import Row, Table, Text
from compare.show.terminal import terminal_table
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import Experiment, load, named_experiments
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
    """Name every experiment, preset, fault, engine and lesson, a line each.

    Try:
      shardpair list
      shardpair list --json
    """

    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self, default: Experiment) -> int:
        """Print them. Returns 0."""
        peers = {
            peer.name: peer.pip_line if missing_package(peer, sys.executable) else ""
            for peer in PEERS.values()
        }
        everything = {
            "experiments": list(experiments()),
            "presets": [
                Entry(name, of.description, {"devices": 1 if name == "single" else of.devices})
                for name, of in PRESETS.items()
            ],
            "faults": [Entry(name, of.description, {"caught_at": of.rung}) for name, of in FAULTS.items()],
            "engines": [
                Entry(name, of.decides, {"pipelines": ", ".join(of.layouts.schedules)})
                for name, of in STUDIED.items()
            ],
            "peers": [Entry(name, PEERS[name].decides, {"missing": line}) for name, line in peers.items()],
            "lessons": [
                Entry(name, f"{of.title}, in all engines on one page", {"preset": of.preset})
                for name, of in LESSONS.items()
            ],
        }
        if self.json:
            print_json(everything)
            return 0
        for subject, entries in everything.items():
            facts = list(entries[0].facts)
            cells = {entry.name: (*entry.facts.values(), entry.description) for entry in entries}
            rows = [
                Row(Text(name), [Text(f"{fact:,}" if isinstance(fact, int) else fact) for fact in of])
                for name, of in cells.items()
            ]
            table = Table(name="", corner=subject, columns=[*facts, ""], rows=rows, look="words")
            results_console().print(terminal_table(table))
        return 0


def experiments() -> Iterator[Entry]:
    """Those that ship with the package, with their sizes and the first sentence of their comment."""
    for name, path in named_experiments().items():
        experiment = load(name)
        facts: dict[str, str | int] = {
            "parameters": parameter_count(experiment.model),
            "steps": experiment.train.max_iters,
            "dtype": experiment.precision.dtype,
            "devices": experiment.layout.devices,
        }
        yield Entry(name, _first_sentence(path), facts)


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment that an experiment begins with, or what stands before its colon."""
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    return re.split(r"[.:](?:\s|$)", " ".join(lines), maxsplit=1)[0]
