"""`shardpair precisions`: losses of every engine in 32 and in 16 bits, and how far apart they are."""

from pathlib import Path
from typing import ClassVar

import numpy as np
from msgspec import Struct
from safetensors.numpy import save_file

from compare.flags.arguments import StudiedName
from compare.judge.outcome import PartsOutcome
from compare.numerics.parameters import initial_parameters
from compare.show.findings import Column, Figure, Findings, Series, table_of
from compare.spec.engines.registry import REFERENCE, STUDIED
from compare.spec.experiment import Experiment, edited
from compare.studies.cases import engine_cases
from compare.studies.presets import check_names, spread
from compare.survey import Part, Parts, Survey, survey_findings

ENGINES = (REFERENCE, *(name for name in STUDIED if name != REFERENCE))
DTYPES = ("float32", "bfloat16", "float16")
SMOOTH = 10
"""Steps that a figure takes the mean over."""
NEARBY = 1e-7


class Curves(Struct, frozen=True, kw_only=True):
    """What came of one precision."""

    verdict: str
    losses: dict[str, list[float]]
    """By engine, of every step."""
    skipped: dict[str, int]
    """Steps whose gradients overflowed, by engine."""
    nearby: list[float] = []
    """Losses of the first engine from initial weights that are changed by `NEARBY`."""

    @property
    def first(self) -> list[float]:
        """Losses of the engine that others are held against."""
        return next(iter(self.losses.values()))

    @property
    def between_engines(self) -> np.ndarray:
        """The largest relative difference of any engine from the first, (steps,)."""
        return np.max([apart(losses, self.first) for losses in self.losses.values()], axis=0)


Row = tuple[str, Curves, np.ndarray]
"""A precision, its curves, and how far the first engine's is from its own in the first precision."""


class Precisions(Survey[Curves], frozen=True, kw_only=True):
    """Train in several precisions: how far engines part, beside what a precision costs.

    Every engine trains on one device in each precision, held against the first engine. That one trains once
    more from weights that are changed by a part in ten million: training makes much of any difference.

    Try:
      shardpair precisions cpu --train.max_iters 50 --dtypes float32 bfloat16
    """

    engines: tuple[StudiedName, ...] = ()
    """Which engines; others are held against the first. Default: all, the reference first."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of matrix products; others are held against the first. Default: float32 bfloat16 float16."""

    brief = "losses in float32, bfloat16 and float16, and what parts them"
    group = "Prove"
    default = "cpu"
    own_layouts = "every engine trains on one device"
    asks: ClassVar = {}
    decided: ClassVar = {"precision.dtype": "--dtypes"}
    kept: ClassVar = PartsOutcome[Curves]

    def parts(self, experiment: Experiment) -> Parts:
        """A part for each precision: all engines on one device."""
        check_names("--dtypes", "dtype", self.dtypes, DTYPES)
        wanted = self.dtypes or DTYPES
        left_out = {}
        for name in () if self.engines else ENGINES:
            can = STUDIED[name].precisions
            if lacks := [dtype for dtype in wanted if dtype not in can.dtypes]:
                left_out[name] = f"it has no {', '.join(lacks)}: {can.no_other}"
        engines = [name for name in self.engines or ENGINES if name not in left_out]
        specs = {
            dtype: spread(edited(experiment, {"precision": {"dtype": dtype}}), "single") for dtype in wanted
        }
        return [
            Part(name=dtype, cases=engine_cases(spec, engines)) for dtype, spec in specs.items()
        ], left_out

    def measure(self, part: Part, place: Path) -> Curves:
        """The engines' losses and verdict; then the first engine's from changed weights."""
        first, *_ = part.cases
        comparison, records = self.trained(part.cases, place / "engines")
        changed = changed_weights(first.experiment, place / "changed.safetensors")
        _, nearby = self.trained([first], place / "nearby", ladder=False, init_from=str(changed))
        return Curves(
            verdict=comparison.sentence(),
            losses={name: [step.loss for step in record.steps] for name, record in records.items()},
            skipped={name: sum(step.skipped for step in record.steps) for name, record in records.items()},
            nearby=[step.loss for step in nearby[first.name].steps],
        )

    @classmethod
    def findings(cls, outcome: PartsOutcome[Curves], folder: Path) -> Findings:
        """A row for each precision, the losses over steps, and their differences."""
        curves = outcome.results
        base = next(iter(curves.values())).first
        found: list[Row] = [(dtype, one, apart(one.first, base)) for dtype, one in curves.items()]
        worst = max(found, key=lambda row: row[1].between_engines.max())
        steps = len(base)
        return survey_findings(
            outcome,
            title=f"{steps} steps in {', '.join(curves)}",
            sentence=f"engines are furthest apart in {worst[0]}: {worst[1].between_engines.max():.1e}",
            tables=[table_of(f"Relative differences of losses over {steps} steps", COLUMNS, found)],
            figures=figures_of(found),
            rows=curves,
            passed=all(one.verdict.startswith("PASS") for one in curves.values()),
        )


COLUMNS = (
    Column[Row]("precision", lambda row: row[0]),
    Column[Row]("last loss", lambda row: row[1].first[-1], ".4f"),
    Column[Row]("furthest from the first", lambda row: float(row[2].max()) or None, ".1e"),
    Column[Row]("between engines", lambda row: float(row[1].between_engines.max()), ".1e"),
    Column[Row](
        f"weights changed by {NEARBY:g}",
        lambda row: float(apart(row[1].nearby, row[1].first).max()) if row[1].nearby else None,
        ".1e",
    ),
    Column[Row]("skipped", lambda row: max(row[1].skipped.values()), "d"),
    Column[Row]("verdict", lambda row: row[1].verdict),
)


def figures_of(found: list[Row]) -> list[Figure]:
    """Losses, and what they differ by: between engines, from the first precision, from changed weights."""
    losses, differences = [], []
    for place, (dtype, curves, off) in enumerate(found):
        losses.append(_line(dtype, curves.first, place))
        differences.append(_line(f"{dtype}: engines", curves.between_engines, place, dash="--"))
        if place:
            differences.append(_line(f"{dtype}: from {found[0][0]}", off, place))
        if curves.nearby:
            label = f"{dtype}: weights changed by {NEARBY:g}"
            differences.append(_line(label, apart(curves.nearby, curves.first), place, dash=":"))
    means = f"Means over {SMOOTH} steps."
    return [
        Figure(title="Loss", caption=means, x="step", y="loss (nats)", series=losses, is_small=True),
        Figure(
            title="Differences",
            caption=means,
            x="step",
            y="relative difference of losses",
            series=differences,
            log="y",
            is_small=True,
        ),
    ]


def _line(label: str, values: list[float] | np.ndarray, colour: int, dash: str = "-") -> Series:
    """Means over `SMOOTH` steps, at the step that each begins with."""
    means = np.convolve(np.asarray(values), np.ones(SMOOTH) / SMOOTH, mode="valid")
    return Series(label=label, x=range(len(means)), y=means.tolist(), colour=colour, dash=dash)


def apart(one: list[float], other: list[float]) -> np.ndarray:
    """Relative differences of two curves, (steps,)."""
    return np.abs(np.array(one) - other) / np.abs(other)


def changed_weights(experiment: Experiment, path: Path) -> Path:
    """Write the seed's weights, each moved by `NEARBY` of itself, up or down."""
    signs = np.random.default_rng(0)
    weights = {
        name: (weight * (1 + NEARBY * signs.choice([-1, 1], weight.shape))).astype(weight.dtype)
        for name, weight in initial_parameters(experiment).items()
    }
    save_file(weights, path)
    return path
