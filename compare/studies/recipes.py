"""`shardpair recipes`: nanoGPT's recipes for small machines, from its config files, in every engine."""

import pickle
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from msgspec import Struct

from compare.contract.record import Record
from compare.flags.arguments import FixedExperiment, StudiedName
from compare.judge.comparison import Comparison
from compare.judge.outcome import PartsOutcome
from compare.numerics.data import standard_library_text
from compare.numerics.evaluation import Evaluation
from compare.show.findings import Column, Figure, Findings, Series, Table, table_of
from compare.spec.engines.registry import REFERENCE, STUDIED
from compare.spec.experiment import Experiment
from compare.studies.cases import engine_cases
from compare.studies.nanogpt_config import load_config
from compare.studies.presets import check_names, spread
from compare.survey import Part, Parts, Survey, survey_findings

ENGINES = (REFERENCE, *(name for name in STUDIED if name != REFERENCE))
CHARACTERS = 1_000_000
COMMON = {"gradient_accumulation_steps": 1, "learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99}
RECIPES: dict[str, dict[str, Any]] = {
    "cpu": {
        **COMMON,
        "eval_interval": 250,
        "eval_iters": 20,
        "batch_size": 12,
        "block_size": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "dropout": 0.0,
        "max_iters": 2000,
        "lr_decay_iters": 2000,
        "warmup_iters": 100,
    },
    "baby": {
        **COMMON,
        "eval_interval": 50,
        "eval_iters": 10,
        "batch_size": 1,
        "block_size": 256,
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "dropout": 0.2,
        "max_iters": 100,
        "lr_decay_iters": 5000,
        "warmup_iters": 100,
    },
}
"""nanoGPT's README for a CPU; and its config/train_shakespeare_char.py, 100 steps of one sequence."""


class Recipe(Struct, frozen=True, kw_only=True):
    """What came of a recipe."""

    verdict: str
    """Of the comparison, in a line."""
    minutes: float
    """Of all engines, one after the other."""
    evaluations: dict[str, list[Evaluation]]
    """By engine: mean losses of the training and of the validation split, in nats."""


Row = tuple[Evaluation, ...]
"""Of one step, by each engine."""


class Recipes(FixedExperiment, Survey[Recipe], frozen=True, kw_only=True):
    """Train nanoGPT's recipes for small machines with every engine, from files in nanoGPT's own format.

    Each is a folder as nanoGPT has it: config/NAME.py, and data/pages with train.bin, val.bin and meta.pkl,
    of the characters of a megabyte of Python's standard library.

    Try:
      shardpair recipes --names baby
    """

    engines: tuple[StudiedName, ...] = ()
    """Which engines; others are held against the first. Default: all, the reference first."""
    names: tuple[str, ...] = ()
    """Which recipes. Default: cpu and baby."""

    brief = "nanoGPT's config files in every engine, with validation"
    group = "Train and compare"
    own_layouts = "a recipe is trained on one device"
    asks: ClassVar = {}
    kept: ClassVar = PartsOutcome[Recipe]

    def parts(self, experiment: Experiment) -> Parts:
        """A part for each recipe: all engines on one device."""
        check_names("--names", "recipe", self.names, RECIPES)
        specs = {name: load_config(config_of(name))[0] for name in self.names or RECIPES}
        return [
            Part(name=name, cases=engine_cases(spread(spec, "single"), list(self.engines or ENGINES)))
            for name, spec in specs.items()
        ], {}

    def measure(self, part: Part, place: Path) -> Recipe:
        """Train it, and say how long that took."""
        begun = time.perf_counter()
        found = super().measure(part, place)
        return msgspec.structs.replace(found, minutes=(time.perf_counter() - begun) / 60)

    def result(self, comparison: Comparison, records: Mapping[str, Record]) -> Recipe:
        """The evaluations of every engine."""
        return Recipe(
            verdict=comparison.sentence(),
            minutes=0.0,
            evaluations={name: list(record.evaluations) for name, record in records.items()},
        )

    @classmethod
    def findings(cls, outcome: PartsOutcome[Recipe], folder: Path) -> Findings:
        """A table for each recipe: both losses of every engine at every evaluation."""
        found = outcome.results
        return survey_findings(
            outcome,
            title="nanoGPT's recipes",
            sentence="; ".join(f"{name}: {one.verdict}" for name, one in found.items()),
            tables=[_table(name, one) for name, one in found.items()],
            figures=[_figure(name, one) for name, one in found.items()],
            rows=found,
            passed=all(one.verdict.startswith("PASS") for one in found.values()),
        )


def _table(name: str, found: Recipe) -> Table:
    losses = [
        Column[Row](engine, lambda row, place=place: f"{row[place].train:.4f} / {row[place].validation:.4f}")
        for place, engine in enumerate(found.evaluations)
    ]
    settings = ", ".join(f"{key} = {value}" for key, value in RECIPES[name].items())
    return table_of(
        f"{name}: loss of the training / validation split",
        [Column[Row]("after steps", lambda row: str(row[0].step)), *losses],
        list(zip(*found.evaluations.values(), strict=True)),
        below=f"{settings}. {found.minutes:.1f} minutes for all engines. {found.verdict}",
    )


def _figure(name: str, found: Recipe) -> Figure:
    return Figure(
        title=f"{name}: validation loss",
        caption="Where curves coincide, one covers the others.",
        x="step",
        y="loss (nats)",
        series=[
            Series(
                label=engine,
                x=[one.step for one in losses],
                y=[one.validation for one in losses],
                colour=place,
                mark="osD^"[place % 4],
            )
            for place, (engine, losses) in enumerate(found.evaluations.items())
        ],
    )


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    """Where the files of recipes are, until this process ends."""
    return tempfile.TemporaryDirectory(prefix="recipes-")


@cache
def config_of(name: str) -> Path:
    """Write a recipe's folder as nanoGPT has it. Returns its config file."""
    folder = Path(_scratch().name) / name
    data, config = folder / "data" / "pages", folder / "config" / "train_pages_char.py"
    data.mkdir(parents=True)
    config.parent.mkdir()
    text = standard_library_text(CHARACTERS).decode("ascii", errors="ignore")
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    tokens = np.array([number[character] for character in text], np.uint16)
    cut = int(0.9 * len(tokens))
    tokens[:cut].tofile(data / "train.bin")
    tokens[cut:].tofile(data / "val.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": number}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    lines = [f"{name} = {value!r}" for name, value in {"dataset": "pages", **RECIPES[name]}.items()]
    config.write_text("\n".join(lines) + "\n")
    return config
