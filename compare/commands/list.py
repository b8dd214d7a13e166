"""`shardpair list`: names for the command line."""

import re
from pathlib import Path

from msgspec import Struct

from compare.commands.faults import FAULTS
from compare.flags import AsJson
from compare.numerics.parameters import parameter_count
from compare.setup.lessons import LESSONS
from compare.setup.presets import PRESETS
from compare.show.envelope import Envelope
from compare.show.findings import Row, Table, Text
from compare.show.terminal import print_table
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import load, named_experiments
from compare.terminal import print_json


class List(Struct, frozen=True, kw_only=True):
    """Print the names of all experiments, presets, faults, engines and lessons."""

    json: AsJson = False

    def __call__(self) -> int:
        """Print them. Returns 0."""
        subjects: dict[str, list[dict[str, str | int]]] = {
            "experiments": [_experiment(name, path) for name, path in named_experiments().items()],
            "presets": [
                dict(name=name, devices=of.devices, description=of.description)
                for name, of in PRESETS.items()
            ],
            "faults": [
                dict(name=name, caught_at=of.rung, description=of.mistake) for name, of in FAULTS.items()
            ],
            "engines": [
                dict(name=name, pipelines=", ".join(of.layouts.schedules), description=of.decides)
                for name, of in STUDIED.items()
            ],
            "peers": [dict(name=name, description=of.decides) for name, of in PEERS.items()],
            "lessons": [
                dict(name=name, preset=of.preset, description=f"{of.title}, in all engines on one page")
                for name, of in LESSONS.items()
            ],
        }
        if self.json:
            counts = ", ".join(f"{len(named)} {subject}" for subject, named in subjects.items())
            print_json(Envelope(study="list", passed=True, verdict=counts, values=subjects))
            return 0
        for subject, named in subjects.items():
            texts = [[Text(f"{of:,}" if isinstance(of, int) else of) for of in one.values()] for one in named]
            _, *facts, _ = named[0]
            rows = [Row(name, more) for name, *more in texts]
            table = Table(name="", corner=subject, columns=[*facts, ""], rows=rows, words=len(facts) + 1)
            print_table(table)
        return 0


def _experiment(name: str, path: Path) -> dict[str, str | int]:
    """Size of an experiment, and the first sentence of its file's comment, up to a colon."""
    experiment = load(name)
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    return dict(
        name=name,
        parameters=parameter_count(experiment.model),
        steps=experiment.train.max_iters,
        dtype=experiment.precision.dtype,
        devices=experiment.layout.devices,
        description=re.split(r"[.:](?:\s|$)", " ".join(lines), maxsplit=1)[0],
    )
