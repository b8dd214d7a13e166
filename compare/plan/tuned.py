"""Layouts that were planned and then timed: how far predictions are off, and how well they rank."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from compare.judge.bench_rows import by_round
from compare.judge.outcome import Case, Outcome
from compare.judge.statistics import Estimate, estimate, ratios
from compare.judge.timed_outcome import TimedOutcome, timed
from compare.plan.machine import Machine
from compare.plan.search import memory_of
from compare.show.figures import INK, MARKERS, Figure, colour, log_scale
from compare.show.findings import Column
from compare.terminal import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FASTER = 1.2
"""A case that takes so much longer than the fastest one in every round, twice at least, is timed no more."""


class TuneOutcome(TimedOutcome, frozen=True, kw_only=True):
    """Cases, what was predicted of each, and how long they took."""

    machines: dict[str, Machine]
    """By engine: what was planned for."""
    predicted_ms: dict[str, float]
    """By case."""
    budget_s: float = 0.0
    """Of all processes together, after the first round; 0 for no end."""

    @property
    def spent_s(self) -> float:
        """Seconds that processes took, from their start to the end of their windows."""
        return sum(
            one.start_up_s + one.compile_s + one.first_step_s + one.windows_seen_s + sum(one.single_ms) / 1e3
            for one in self.measurements
        )

    def is_given_up(self, case: Case) -> bool:
        """True for a case that is clearly slower; or if all that is left is beyond the budget."""
        own = by_round(self, case)
        is_late = bool(own) and 0 < self.budget_s < self.spent_s
        return is_late or self.is_slower(case)

    def is_slower(self, case: Case) -> bool:
        """True if it was `FASTER` times slower than the round's fastest case, in two rounds and all."""
        fastest: dict[int, float] = {}
        for one in self.measurements:
            fastest[one.round] = min(one.wall_ms, fastest.get(one.round, one.wall_ms))
        own = {number: one.wall_ms for number, one in by_round(self, case).items()}
        found = ratios(own, fastest)
        return len(found) > 1 and min(found) > FASTER


def tuned(outcome: Outcome) -> TuneOutcome:
    """The figures of a `shardpair tune`. Raises RecordError: they are garbled."""
    view, more = timed(outcome), outcome.more
    return TuneOutcome(
        **{name: getattr(view, name) for name in TimedOutcome.__struct_fields__},
        machines=msgspec.convert(more["machines"], dict[str, Machine]),
        predicted_ms=more["predicted_ms"],
        budget_s=more["budget_s"],
    )


class Row(Struct, frozen=True, kw_only=True):
    """One layout of one engine: predicted and measured."""

    engine: str
    layout: str
    predicted_ms: float
    measured_ms: Estimate
    rounds: int
    error: float
    error_after: float
    """With the engine's median ratio divided out."""
    predicted_bytes: float
    """At the peak."""
    measured_bytes: int

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured bytes."""
        return self.predicted_bytes / self.measured_bytes if self.predicted_bytes else None


COLUMNS = (
    Column[Row]("layout", lambda row: row.layout),
    Column[Row]("engine", lambda row: row.engine),
    Column[Row]("predicted ms", lambda row: row.predicted_ms, ".1f"),
    Column[Row]("measured ms", lambda row: row.measured_ms, ".1f"),
    Column[Row]("rounds", lambda row: row.rounds, "d"),
    Column[Row]("error", lambda row: row.error, "+.0%"),
    Column[Row]("after one factor", lambda row: row.error_after, "+.0%"),
    Column[Row]("peak", lambda row: row.measured_bytes, human_bytes),
    Column[Row]("predicted / peak", lambda row: row.memory_ratio, ".2f"),
)


def rows_of(outcome: TuneOutcome) -> list[Row]:
    """A row for each case that finished once."""
    own = {case.name: (case, by_round(outcome, case)) for case in outcome.cases}
    timed = {name: (case, rounds) for name, (case, rounds) in own.items() if rounds}
    found: dict[str, float] = {}
    of_engine: dict[str, list[float]] = {}
    for name, (case, rounds) in timed.items():
        median = statistics.median(one.wall_ms for one in rounds.values())
        found[name] = outcome.predicted_ms[name] / median
        of_engine.setdefault(case.engine, []).append(found[name])
    factors = {engine: statistics.median(ratio) for engine, ratio in of_engine.items()}
    return [
        Row(
            engine=case.engine,
            layout=case.layout,
            predicted_ms=outcome.predicted_ms[name],
            measured_ms=estimate([one.wall_ms for one in rounds.values()]),
            rounds=len(rounds),
            error=found[name] - 1,
            error_after=found[name] / factors[case.engine] - 1,
            predicted_bytes=sum(memory_of(case.engine, case.experiment).values()),
            measured_bytes=max(one.peak_mem_bytes for one in rounds.values()),
        )
        for name, (case, rounds) in timed.items()
    ]


def said(rows: Sequence[Row]) -> str:
    """How well the layouts of one engine were predicted."""
    errors, after = ([abs(getattr(row, name)) for row in rows] for name in ("error", "error_after"))
    words = [f"median error {statistics.median(errors):.0%}, worst {max(errors):.0%}"]
    words.append(f"after one factor {statistics.median(after):.0%}, worst {max(after):.0%}")
    tau = kendall([row.predicted_ms for row in rows], [row.measured_ms.median for row in rows])
    return ", ".join([*words, *([f"Kendall's tau {tau:.2f}"] if tau is not None else [])])


def kendall(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders; None of fewer than two, or where all are the same."""
    from scipy.stats import kendalltau  # half a second to import

    tau = float(kendalltau(predicted, measured).statistic) if len(predicted) > 1 else math.nan
    return None if math.isnan(tau) else tau


def against(rows: Sequence[Row]) -> Figure:
    """Predicted over measured times, a colour for each engine."""

    def draw(axes: "Axes") -> None:
        for place, (engine, own) in enumerate(by_engine(rows).items()):
            measured, predicted = [row.measured_ms.median for row in own], [row.predicted_ms for row in own]
            axes.plot(measured, predicted, MARKERS[place % len(MARKERS)], color=colour(place), label=engine)
        ends = [row.measured_ms.median for row in rows]
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=INK, linewidth=1, label="equal")
        axes.set(xlabel="measured (ms)", ylabel="predicted (ms)")
        log_scale(axes, "x", "y")

    return Figure(
        title="Predicted against measured",
        caption="Above the line a prediction is too slow; points that rise are ranked as they are.",
        draw=draw,
    )


def by_engine(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each engine."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.engine, []).append(row)
    return found
