"""`shardpair moves`: trainings that stop and go on elsewhere, held against uninterrupted ones."""

from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from compare.checkpoint.description import CHECKPOINTS, folder_name
from compare.judge.checkpoint_difference import difference
from compare.judge.outcome import PartsOutcome
from compare.judge.tolerances import TOLERANCES
from compare.show.findings import Column, Findings, table_of
from compare.spec.engines.jax import JAX
from compare.spec.engines.registry import REFERENCE, STUDIED
from compare.spec.engines.torch import TORCH
from compare.spec.experiment import Experiment, edited, revalidate
from compare.studies.cases import Case
from compare.survey import Part, Parts, Survey, survey_findings
from compare.terminal.units import error_text

STEPS, HALF = 40, 20
ENGINES = (REFERENCE, *(name for name in STUDIED if name != REFERENCE))
OTHERS = dict(
    zip(
        (engine.name for engine in TORCH.engines),
        (engine.name for engine in reversed(JAX.engines)),
        strict=False,
    )
)
"""An engine of the other framework, for one of each: by hand for by hand."""
ONE = {"dp_replicate": 1, "dp_shard": 1, "zero": 0, "tp": 1, "pp": 1}
FSDP, TP = {**ONE, "dp_shard": 2, "zero": 3}, {**ONE, "tp": 2}
PIPELINE = {**ONE, "pp": 2, "microbatches": 4}


class Leg(Struct, frozen=True):
    """A part of a training: up to which step, by whom, on which layout."""

    until: int
    engine: str
    layout: dict[str, int]


def _to(layout: dict[str, int]) -> list[list[Leg]]:
    """From FSDP to a layout, by every engine alone."""
    return [[Leg(HALF, name, FSDP), Leg(STEPS, name, layout)] for name in ENGINES]


def _over(one: str, other: str) -> list[Leg]:
    return [Leg(HALF, one, FSDP), Leg(STEPS, other, FSDP)]


def _back(one: str, other: str) -> list[Leg]:
    return [Leg(HALF, one, FSDP), Leg(30, other, PIPELINE), Leg(STEPS, one, FSDP)]


JOURNEYS: dict[str, tuple[float, list[list[Leg]]]] = {
    "same layout": (0.0, _to(FSDP)),
    "another layout: fsdp over 2, then tp over 2": (0.2, _to(TP)),
    "more devices: fsdp over 2, then fsdp x tp over 4": (0.0, _to({**FSDP, "tp": 2})),
    "fewer devices: fsdp over 2, then one": (0.2, _to(ONE)),
    "the other framework": (
        0.0,
        [leg for one, other in OTHERS.items() for leg in (_over(one, other), _over(other, one))],
    ),
    "there and back: a pipeline of the other framework in between": (
        0.2,
        [_back(REFERENCE, OTHERS[REFERENCE]), _back(OTHERS[REFERENCE], REFERENCE)],
    ),
}
"""Dropout, and trainings in legs, by the name of what they do. All begin with FSDP over two devices."""


class Journey(Struct, frozen=True, kw_only=True):
    """What came of one training."""

    name: str
    dropout: float
    engines: list[str]
    """Of its legs."""
    difference: dict[str, float]
    """At the end, by weights, m and v."""


class Moves(Survey[list[Journey]], frozen=True, kw_only=True):
    """Stop trainings and go on elsewhere: another layout, more devices or fewer, the other framework.

    Forty steps without a stop; and the same, stopped once or twice and gone on. The largest difference of any
    weight and of either moment at the last step is held to the tolerance of the experiment's precision.

    Try:
      shardpair moves
    """

    brief = "trainings that go on elsewhere, beside uninterrupted ones"
    group = "Prove"
    default = "check"
    own_layouts = "every training has layouts of its own"
    decided: ClassVar = {
        "model.dropout": "the trainings, every second of which has some",
        "train.max_iters": f"the study, which needs {STEPS} steps",
        "checkpoint.every": f"the study, which stops after {HALF} steps",
    }
    kept: ClassVar = PartsOutcome[list[Journey]]

    def parts(self, experiment: Experiment) -> Parts:
        """A part for each engine that begins, and each rate of dropout: uninterrupted, then its journeys."""
        found = []
        for rate, engine in ((rate, engine) for rate in (0.0, 0.2) for engine in ENGINES):
            cases = [_case("whole", Leg(STEPS, engine, FSDP), rate, experiment)]
            for name, legs in _beginning_with(engine, rate):
                cases += [_case(f"{name}, leg {n}", leg, rate, experiment) for n, leg in enumerate(legs, 1)]
            found.append(Part(name=f"{engine}, dropout {rate}", cases=cases))
        return found, {}

    def measure(self, part: Part, place: Path) -> list[Journey]:
        """Every journey's difference from the uninterrupted run, whose checkpoint is its first leg."""
        (whole, *_), cases = part.cases, {case.name: case for case in part.cases}
        rate = whole.experiment.model.dropout
        expected = self._checkpoint(whole, place / "whole")
        journeys = []
        for number, (name, (first, *others)) in enumerate(_beginning_with(whole.engine, rate)):
            found = expected.with_name(folder_name(first.until))
            for leg in range(2, len(others) + 2):
                case = cases[f"{name}, leg {leg}"]
                found = self._checkpoint(case, place / f"{number}-{leg}", resume=str(found))
            engines = [leg.engine for leg in (first, *others)]
            off = difference(found, expected)
            journeys.append(Journey(name=name, dropout=rate, engines=engines, difference=off))
        return journeys

    def _checkpoint(self, case: Case, place: Path, resume: str = "") -> Path:
        """Train one case alone. Returns its last checkpoint."""
        alone = Case(name=case.engine, engine=case.engine, experiment=case.experiment)
        self.trained([alone], place, resume=resume)
        return place / case.engine / CHECKPOINTS / folder_name(case.experiment.train.max_iters)

    @classmethod
    def findings(cls, outcome: PartsOutcome[list[Journey]], folder: Path) -> Findings:
        """A row for each training, in the order of the journeys."""
        found = [one for journeys in outcome.results.values() for one in journeys]
        found.sort(key=lambda one: list(JOURNEYS).index(one.name))
        limit = TOLERANCES[outcome.experiment.precision.dtype]["final_weights"].limit
        worst = max(max(one.difference.values()) for one in found)
        return survey_findings(
            outcome,
            title="Trainings that went on elsewhere",
            sentence=f"{len(found)} trainings moved; the largest difference is {error_text(worst)}",
            tables=[table_of(f"Differences at step {STEPS} from an uninterrupted run", COLUMNS, found)],
            rows=found,
            passed=worst <= limit,
        )


COLUMNS = (
    Column[Journey]("journey", lambda one: one.name),
    Column[Journey]("engines", lambda one: " > ".join(one.engines)),
    Column[Journey]("dropout", lambda one: one.dropout),
    Column[Journey]("weights", lambda one: one.difference["weights"], error_text),
    Column[Journey]("m", lambda one: one.difference["m"], error_text),
    Column[Journey]("v", lambda one: one.difference["v"], error_text),
)


def _beginning_with(engine: str, rate: float) -> list[tuple[str, list[Leg]]]:
    """The trainings that an engine begins, with this dropout."""
    return [
        (name, legs)
        for name, (dropout, each) in JOURNEYS.items()
        for legs in each
        if dropout == rate and legs[0].engine == engine
    ]


def _case(name: str, leg: Leg, dropout: float, experiment: Experiment) -> Case:
    edits = {
        "model": {"dropout": dropout},
        "train": {"max_iters": leg.until},
        "layout": leg.layout,
        "checkpoint": {"every": HALF, "keep": 3},
    }
    return Case(name=name, engine=leg.engine, experiment=revalidate(edited(experiment, edits)))
