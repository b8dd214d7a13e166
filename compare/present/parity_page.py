"""The parity matrix as a page: docs/generated/parity.md."""

from collections.abc import Mapping, Sequence

from compare.judge.closed_forms.memory import KINDS, TOLERANCE
from compare.spec.engines.registry import REFERENCE
from compare.studies.matrix_cells import SHOWN, STUDIES, Cell
from compare.studies.presets import PRESETS

PREAMBLE = """Written by `make matrix`, not by hand. Every engine under every layout, {steps} steps, against
ONE unsharded device (PyTorch, no container, no collective). A cell is the worst relative error of a gradient
before clipping / of a weight after the last of these steps, over all parameters. Limits: 1e-10 in float64;
in float32 1e-5 on gradients and 1e-2 on weights, which Adam lets every rounding into. AdamW with clipping,
unless it says SGD (with momentum, without clipping). Where an engine lacks the schedule of a composition,
1F1B, the cell says which one it ran."""
RESIDENT = """Bytes of parameters / gradients / optimizer state that are there between two steps of the first
study (gradients: just before the optimizer's step), each on the device that has most of it, in kB (1e3
bytes). The closed form is that of PyTorch's pipelines, whose first and last stage alone have the embedding;
in the JAX engines every stage has it, because all devices run one program. torch-library's ZeRO-2 is FSDP2,
which keeps shards of the parameters, too, between two steps. In brackets, how far the device that is furthest
from its own engine's closed form is off it: more than 5 % fails the cell."""


def markdown(cells: list[Cell], *, steps: int, version: str) -> str:
    """The grid as a page of its own: docs/generated/parity.md.

    Args:
        cells: row by row.
        steps: optimizer steps of each study.
        version: of what ran it, in words.
    """
    engines = list(dict.fromkeys(cell.engine for cell in cells))
    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    by_place = {(cell.engine, cell.layout): cell for cell in cells}
    ran = [cell for cell in cells if not cell.refusal]
    lines = [
        "# Parity",
        "",
        PREAMBLE.format(steps=steps),
        "",
        f"{sum(cell.passed for cell in ran)} of {len(ran)} cells pass. {version}.",
    ]
    for name in STUDIES:
        if any(name in cell.verdicts or name in cell.failures for cell in cells):
            rows = [
                (
                    f"`{layout}` {PRESETS[layout].description}",
                    str(PRESETS[layout].devices),
                    *(cell_text(by_place[engine, layout], name) for engine in engines),
                )
                for layout in layouts
            ]
            lines += ["", f"## {name}", "", *_table(("layout", "devices", *engines), rows)]
    rows = [resident_row([by_place[engine, layout] for engine in engines]) for layout in layouts]
    lines += ["", "## What a device holds", "", RESIDENT, ""]
    lines += _table(("layout", "closed form", *engines), rows)
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
    found = (verdict.error(rung) for rung in SHOWN)
    errors = " / ".join("?" if error is None else f"{error:.0e}" for error in found)
    if not verdict.passed:
        return f"**{verdict.sentence()}**"
    return f"{errors} ({cell.note})" if cell.note else errors


def resident_row(cells: Sequence[Cell]) -> list[str]:
    """One layout's cells: its name, the closed form, and each engine's bytes at rest by kind."""
    by_engine = {cell.engine: _kilobytes(cell.closed_form) for cell in cells if cell.closed_form}
    expected = by_engine.get(REFERENCE) or next(iter(by_engine.values()), "")
    return [cells[0].layout, expected, *map(_resident_text, cells)]


def _resident_text(cell: Cell) -> str:
    if not cell.resident:
        return "-" if cell.refusal else ""
    held = _kilobytes(cell.resident)
    off = f"({cell.excess:+.1%})"
    return f"{held} {off}" if abs(cell.excess) <= TOLERANCE else f"**{held} {off}**"


def _kilobytes(by_kind: Mapping[str, Sequence[float]]) -> str:
    return " / ".join(f"{max(by_kind[kind]) / 1e3:.0f}" for kind in KINDS)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
