"""The parity matrix: every engine under every layout against one unsharded device, as one grid.

A layout is a preset. Three studies are made of each cell: float64 and float32 with AdamW and clipping, and
float64 with SGD and no clipping, which hides nothing of a gradient's scale.
"""

import msgspec
from msgspec import Struct

from compare.contract.engines import ENGINES
from compare.contract.experiment import Experiment, ExperimentError, revalidate
from compare.numerics import Verdict
from compare.pairing import Case, Comparison
from compare.presets import PRESETS, preset_layout

STUDIES: dict[str, dict[str, dict[str, object]]] = {
    "float64": {"precision": {"dtype": "float64"}},
    "float32": {"precision": {"dtype": "float32"}},
    "float64, SGD": {
        "precision": {"dtype": "float64"},
        "optimizer": {"name": "sgd", "momentum": 0.9, "grad_clip": 0.0, "learning_rate": 0.1, "min_lr": 0.01},
    },
}
PREAMBLE = """Written by `make matrix`, not by hand. Every engine under every layout, 20 steps, against ONE
unsharded device (PyTorch, no container, no collective). A cell is the worst relative error of a gradient
before clipping / of a weight after 20 steps, over all parameters. Limits: 1e-10 in float64; in float32 1e-5
on gradients. AdamW with clipping, unless it says SGD (with momentum, without clipping)."""
LAYOUTS = [name for name in PRESETS if name != "single"]


class Cell(Struct, frozen=True, kw_only=True):
    """One engine under one layout."""

    engine: str
    layout: str
    refusal: str = ""
    """Why the engine cannot express the layout; empty if it can."""
    verdicts: dict[str, Verdict] = msgspec.field(default_factory=dict)
    """By study."""
    failures: dict[str, str] = msgspec.field(default_factory=dict)
    """By study: why the engine did not finish."""

    @property
    def passed(self) -> bool:
        """Whether every study of an expressible cell passed."""
        return not self.failures and all(verdict.passed for verdict in self.verdicts.values())


def study(experiment: Experiment, name: str) -> Experiment:
    """The experiment as a study changes it."""
    sections = {
        section: msgspec.structs.replace(getattr(experiment, section), **fields)
        for section, fields in STUDIES[name].items()
    }
    return revalidate(msgspec.structs.replace(experiment, **sections))


def matrix_cases(
    experiment: Experiment, engines: list[str], layouts: list[str]
) -> tuple[list[Case], dict[tuple[str, str], str]]:
    """The unsharded reference and a case for each cell; and why the other cells are none.

    Args:
        experiment: one study's.
        engines: names in ENGINES.
        layouts: names in PRESETS.

    Returns:
        The cases, named ENGINE.LAYOUT, and the reasons by (engine, layout).

    Raises:
        ExperimentError: no such layout, or one that the experiment's sizes do not fit.
    """
    whole = msgspec.structs.replace(experiment, layout=preset_layout(experiment.layout, "single", 1))
    cases = [Case(name="reference", engine="torch-manual", experiment=whole)]
    refusals = {}
    for layout in layouts:
        devices = PRESETS[layout].devices if layout in PRESETS else 1
        spread = preset_layout(experiment.layout, layout, devices)
        sharded = revalidate(msgspec.structs.replace(experiment, layout=spread))
        for engine in engines:
            try:
                ENGINES[engine].require(spread)
            except ExperimentError as reason:
                refusals[engine, layout] = str(reason)
                continue
            is_same_for_all = (
                layout.startswith("ddp_") and spread.tp == 1 and not ENGINES[engine].offers_choice
            )
            if is_same_for_all:
                refusals[engine, layout] = f"the same as ddp: {ENGINES[engine].name} chooses for itself"
                continue
            cases.append(Case(name=f"{engine}.{layout}", engine=engine, experiment=sharded))
    return cases, refusals


def make_cells(
    engines: list[str],
    layouts: list[str],
    refusals: dict[tuple[str, str], str],
    studies: dict[str, Comparison],
) -> list[Cell]:
    """Put the studies' verdicts together, layout by layout."""
    found = {
        name: {verdict.candidate: verdict for verdict in comparison.verdicts}
        for name, comparison in studies.items()
    }
    cells = []
    for layout in layouts:
        for engine in engines:
            case = f"{engine}.{layout}"
            cells.append(
                Cell(
                    engine=engine,
                    layout=layout,
                    refusal=refusals.get((engine, layout), ""),
                    verdicts={name: verdicts[case] for name, verdicts in found.items() if case in verdicts},
                    failures={
                        name: comparison.failures[case]
                        for name, comparison in studies.items()
                        if case in comparison.failures
                    },
                )
            )
    return cells


def markdown(cells: list[Cell], *, version: str) -> str:
    """The grid as a page of its own: docs/parity.md."""
    engines = list(dict.fromkeys(cell.engine for cell in cells))
    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    by_place = {(cell.engine, cell.layout): cell for cell in cells}
    ran = [cell for cell in cells if not cell.refusal]
    lines = [
        "# Parity",
        "",
        PREAMBLE,
        "",
        f"{sum(cell.passed for cell in ran)} of {len(ran)} cells pass. {version}.",
    ]
    for name in STUDIES:
        if not any(name in cell.verdicts or name in cell.failures for cell in cells):
            continue
        lines += ["", f"## {name}", "", f"| layout | devices | {' | '.join(engines)} |"]
        lines.append("|---|---:|" + "---:|" * len(engines))
        for layout in layouts:
            texts = [cell_text(by_place[engine, layout], name) for engine in engines]
            lines.append(
                f"| `{layout}` {PRESETS[layout].story} | {PRESETS[layout].devices} | {' | '.join(texts)} |"
            )
    reasons = sorted({cell.refusal for cell in cells if cell.refusal})
    if reasons:
        lines += ["", "## Why a cell is -", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"


def cell_text(cell: Cell, name: str) -> str:
    """One cell of one study: `gradient / weight` errors, -, or what went wrong."""
    if cell.refusal:
        return "-"
    if name in cell.failures:
        return f"did not finish: {cell.failures[name]}"
    if name not in cell.verdicts:
        return ""
    verdict = cell.verdicts[name]
    errors = " / ".join(f"{verdict.error(rung) or 0.0:.0e}" for rung in ("gradients", "later_weights"))
    return errors if verdict.passed else f"**{verdict.sentence()}**"
