"""Curves over the steps of a run: reduced to what a picture can show, and read off under a pointer."""

import math
import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct

from compare.contract.record import Record, Step
from compare.present.report.slim_svg import Readings

WINDOWS = 150  # points of a curve; longer runs are reduced over windows
POINTED_AT = 100
"""Points whose values can be read."""
Reduce = Callable[[Sequence[float]], float]


class StepCurve(Struct, frozen=True, kw_only=True):
    """A figure of one case over its steps, and at the same places as it is drawn."""

    name: str
    whole: list[float]
    """Of every step, NaN or infinite where the run had it so."""
    steps: list[int]
    """The first of each window."""
    values: list[float]
    """Of each window."""

    @property
    def title(self) -> str:
        """The name; and from which step on it cannot be drawn, where that is so."""
        lost = next((place for place, value in enumerate(self.whole) if not math.isfinite(value)), None)
        return self.name if lost is None else f"{self.name} (not finite from step {self.steps[0] + lost})"


def curves_of(
    names: Sequence[str], records: Sequence[Record], value_of: Callable[[Step], float]
) -> list[StepCurve]:
    """A figure of every case, the mean of each window.

    Args:
        names: of the cases.
        records: one for each.
        value_of: the figure of a step.
    """
    pairs = zip(names, records, strict=True)
    return [
        curve(name, record.steps, [value_of(step) for step in record.steps], statistics.fmean)
        for name, record in pairs
    ]


def curve(name: str, steps: Sequence[Step], values: Sequence[float], reduce: Reduce) -> StepCurve:
    """The curve of one case; steps and values are as many."""
    starts, reduced = windowed(list(values), reduce)
    return StepCurve(
        name=name, whole=list(values), steps=[steps[start].step for start in starts], values=reduced
    )


def windowed(values: list[float], reduce: Reduce) -> tuple[list[int], list[float]]:
    """A long series reduced over equal windows, so that curves which coincide can be told apart.

    Returns:
        The place of each window's first step, and its value; every step where there are at most WINDOWS.
    """
    length = window_length(len(values))
    starts = list(range(0, len(values), length))
    return starts, [reduce(values[start : start + length]) for start in starts]


def window_length(steps: int) -> int:
    """Steps of a window."""
    return max(1, math.ceil(steps / WINDOWS))


def readings_of(curves: Sequence[StepCurve], form: str) -> Readings:
    """What the curves show at each step that can be pointed at: one value where all are written alike.

    Args:
        curves: of one figure.
        form: how a value is written, such as `.4f`.
    """
    found: dict[int, list[str]] = {}
    for one in curves:
        for step, value in zip(one.steps, one.values, strict=True):
            found.setdefault(step, []).append(f"{value:{form}} {one.name}")
    every = -(-len(found) // POINTED_AT)
    steps = sorted(found)[::every]
    return Readings(steps, [_reading(step, found[step], len(curves)) for step in steps])


def _reading(step: int, lines: list[str], count: int) -> str:
    values = {line.partition(" ")[0] for line in lines}
    if len(values) == 1 < len(lines) == count:
        return f"step {step}: {values.pop()} in all {count}"
    return "\n".join((f"step {step}", *lines))
