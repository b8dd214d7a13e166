"""The parity matrix: every engine under every layout against one unsharded device, as one grid.

A layout is a preset. Four studies are made of each cell: float64 and float32 with AdamW and clipping; float64
with SGD and no clipping, which hides nothing of a gradient's scale; and float64 with dropout.
"""

from collections import ChainMap

import msgspec
from msgspec import Struct

from compare.judge.closed_forms.memory import TOLERANCE, closed_form, excess
from compare.judge.comparison import Comparison
from compare.judge.ladder import Verdict
from compare.judge.outcome import StudyOutcome
from compare.spec.engines.engine import Engine
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited, revalidate
from compare.studies.cases import Case
from compare.studies.fitting import refusal
from compare.studies.paired_run import LATER_STEP
from compare.studies.presets import NOTHING_SAID, PRESETS, Said, check_names, check_presets, spread

STUDIES: dict[str, dict[str, dict[str, object]]] = {
    "float64": {"precision": {"dtype": "float64"}, "optimizer": {"name": "adamw"}},
    "float32": {"precision": {"dtype": "float32"}, "optimizer": {"name": "adamw"}},
    "float64, SGD": {
        "precision": {"dtype": "float64"},
        "optimizer": {"name": "sgd", "momentum": 0.9, "grad_clip": 0.0, "learning_rate": 0.1, "min_lr": 0.01},
    },
    "float64, dropout": {
        "precision": {"dtype": "float64"},
        "optimizer": {"name": "adamw"},
        "model": {"dropout": 0.2},
    },
}
SHOWN = ("gradients", "later_weights")
"""The rungs whose errors a cell shows."""
LAYOUTS = [name for name in PRESETS if name != "single"]


class Cell(Struct, frozen=True, kw_only=True):
    """One engine under one layout."""

    engine: str
    layout: str
    refusal: str = ""
    """Why the engine cannot express the layout; empty if it can."""
    note: str = ""
    """What is not as the layout says."""
    verdicts: dict[str, Verdict] = msgspec.field(default_factory=dict)
    """By study."""
    failures: dict[str, str] = msgspec.field(default_factory=dict)
    """By study: why the engine did not finish."""
    resident: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """Bytes at rest per device, of the first study that finished: `Manifest.resident_bytes`."""
    closed_form: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """What they should be."""

    @property
    def excess(self) -> float:
        """Distance of `resident` from the closed form: see `closed_forms.memory.excess`. 0 without any."""
        return excess(self.resident, self.closed_form) if self.resident else 0.0

    @property
    def passed(self) -> bool:
        """True if every study of an expressible cell ran and passed, and its devices hold what they should.

        What was not measured has not passed.
        """
        measured = bool(self.resident) and all(
            verdict.error(rung) is not None for verdict in self.verdicts.values() for rung in SHOWN
        )
        agrees = not self.failures and all(verdict.passed for verdict in self.verdicts.values())
        return measured and agrees and abs(self.excess) <= TOLERANCE


def study(experiment: Experiment, name: str) -> Experiment:
    """The experiment as a study changes it, unchecked: a layout will spread it."""
    return edited(experiment, STUDIES[name])


def matrix_cases(
    experiment: Experiment,
    engines: list[str],
    layouts: list[str],
    said: Said = NOTHING_SAID,
    *,
    flag: str = "--layouts",
) -> tuple[list[Case], dict[tuple[str, str], Cell]]:
    """The unsharded reference and a case for each cell that can be; and all cells, still without verdicts.

    Args:
        experiment: one study's.
        engines: names in ENGINES.
        layouts: names in PRESETS.
        said: fields of the experiment's layout that win over theirs.
        flag: the one that names the layouts.

    Returns:
        The cases, named ENGINE.LAYOUT, and the cells by (layout, engine), row by row.

    Raises:
        ExperimentError: no such layout, one that the experiment's sizes do not fit, or none that an engine
            can express.
    """
    check_names(flag, flag.strip("-").removesuffix("s"), layouts, PRESETS)
    check_presets(flag, experiment.layout, [(name, PRESETS[name].devices) for name in layouts], said)
    cases = [Case(name="reference", engine=REFERENCE, experiment=spread(experiment, "single"))]
    cells = {}
    for name in layouts:
        preset = spread(experiment, name, PRESETS[name].devices, said)
        is_said = "schedule" in said.flags
        for engine in engines:
            layout, note = (
                (preset.layout, "") if is_said else _with_a_schedule_of(ENGINES[engine], preset.layout)
            )
            cells[name, engine] = Cell(
                engine=engine, layout=name, note=note, refusal=refusal(ENGINES[engine], layout, preset=name)
            )
            if not cells[name, engine].refusal:
                sharded = revalidate(msgspec.structs.replace(experiment, layout=layout))
                cases.append(Case(name=f"{engine}.{name}", engine=engine, experiment=sharded))
    if len(cases) == 1:
        raise ExperimentError(f"no cell is left: {next(iter(cells.values())).refusal}")
    return cases, cells


def _with_a_schedule_of(engine: Engine, layout: Layout) -> tuple[Layout, str]:
    """A composition with a pipeline, under GPipe if the engine lacks the preset's schedule; and a note."""
    is_composed, has = layout.pp > 1 and layout.devices > layout.pp, engine.layouts.schedules
    if not is_composed or layout.schedule in has or "gpipe" not in has:
        return layout, ""
    return msgspec.structs.replace(layout, schedule="gpipe"), "gpipe"


def fill(cells: dict[tuple[str, str], Cell], studies: dict[str, tuple[list[Case], Comparison]]) -> list[Cell]:
    """The cells with what the studies found, and with the bytes of the first study that has them.

    Args:
        cells: of `matrix_cases`.
        studies: what ran and what came of it, by the study's name.
    """
    return [_filled(cell, studies) for cell in cells.values()]


def _filled(cell: Cell, studies: dict[str, tuple[list[Case], Comparison]]) -> Cell:
    name = f"{cell.engine}.{cell.layout}"
    verdicts, failures, resident, expected = {}, {}, {}, {}
    for study_name, (cases, comparison) in studies.items():
        found = {verdict.candidate: verdict for verdict in comparison.verdicts}
        if name not in found:
            if not cell.refusal:
                failures[study_name] = comparison.failures.get(name, "it did not run")
            continue
        verdicts[study_name] = found[name]
        if not resident:
            resident = comparison.costs[comparison.cases.index(name)].resident_bytes
            (experiment,) = (case.experiment for case in cases if case.name == name)
            expected = closed_form(cell.engine, experiment)
    return msgspec.structs.replace(
        cell, verdicts=verdicts, failures=failures, resident=resident, closed_form=expected
    )


class MatrixOutcome(StudyOutcome, frozen=True, kw_only=True):
    """Which part of the grid was asked for, and its cells; its studies' comparisons lie in folders beside."""

    engines: list[str]
    layouts: list[str]
    studies: list[str]
    said: Said
    """Fields of the experiment's layout that win over those of the presets."""
    cells: list[Cell] = msgspec.field(default_factory=list)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """Of Python and both frameworks."""

    @property
    def is_blank(self) -> bool:
        """True before a study has begun."""
        return not self.cells

    @property
    def progress(self) -> str:
        """3 of 5 cells."""
        return f"{len(self.good)} of {len(self.ran)} cells"

    @property
    def ran(self) -> list[Cell]:
        """Cells that an engine can express."""
        return [cell for cell in self.cells if not cell.refusal]

    @property
    def good(self) -> list[Cell]:
        """Those of them that pass."""
        return [cell for cell in self.ran if cell.passed]

    @property
    def steps(self) -> int:
        """After which weights are compared."""
        return min(LATER_STEP, self.experiment.train.max_iters)

    def sentence(self) -> str:
        """How many cells pass."""
        return f"{self.progress} pass"

    def planned(self) -> dict[str, tuple[list[Case], dict[tuple[str, str], Cell]]]:
        """The cases and the cells of each study."""
        return {
            name: matrix_cases(study(self.experiment, name), self.engines, self.layouts, self.said)
            for name in self.studies
        }

    def filled(self, comparisons: dict[str, Comparison]) -> "MatrixOutcome":
        """With what came of the studies."""
        plans = self.planned()
        _, blank = next(iter(plans.values()))
        seen = ChainMap(*(versions for one in comparisons.values() for versions in one.versions))
        return msgspec.structs.replace(
            self,
            cells=fill(blank, {name: (plans[name][0], one) for name, one in comparisons.items()}),
            versions={name: seen[name] for name in ("python", "jax", "torch") if name in seen},
        )
