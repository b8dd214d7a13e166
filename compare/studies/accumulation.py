"""`shardpair accumulation`: many small updates or few large ones, by loss over wall time on equal tokens."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from compare.flags.arguments import StudiedName
from compare.judge.bench_rows import by_round
from compare.judge.statistics import Estimate, estimate
from compare.judge.timed_outcome import Measurement, TimedCase, TimedOutcome
from compare.show.findings import Column, Figure, Findings, Series, table_of
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError
from compare.timed_study import Cases, TimedStudy, timed_findings

ABOUT = "Loss is the mean over the last eighth of all tokens; time is that of a median update, times updates."


class Accumulation(TimedStudy, frozen=True, kw_only=True):
    """Train on equal tokens in many small updates or few large ones, and hold loss against wall time.

    An update sums the gradients of 1, 2, 4 or 8 passes over batch_size sequences. More passes share one
    optimizer step and one reduction; fewer leave more updates. The learning rate is the experiment's.

    Try:
      shardpair accumulation demo --rounds 2
      shardpair accumulation demo --layout.dp_replicate 2 --passes 1 4 --engine jax-manual
    """

    passes: tuple[int, ...] = ()
    """Forward and backward passes of an update, a case each; they divide the largest. Default: 1 2 4 8."""
    engine: StudiedName = REFERENCE
    """Which engine trains."""
    updates: int = 0
    """Updates of the case with the most passes: they set the tokens of all. Default: what windows need."""

    brief = "loss over wall time: many small updates or few large ones"
    decided: ClassVar = {"train.max_iters": "--updates", "train.gradient_accumulation_steps": "--passes"}

    def cases(self, experiment: Experiment) -> Cases:
        """A case for each number of passes, with as many updates as its tokens fill."""
        counts, least = sorted({*(self.passes or (1, 2, 4, 8))}), self.timing.steps
        if len(counts) < 2 or counts[0] < 1 or any(counts[-1] % count for count in counts):
            given = " ".join(map(str, self.passes))
            raise ExperimentError(f"--passes {given}: give several numbers that divide the largest")
        if (fewest := self.updates or least) < least:
            raise ExperimentError(f"--updates {fewest}: --window and --windows need {least}")
        cases = []
        for passes in counts:
            train = {"max_iters": fewest * counts[-1] // passes, "gradient_accumulation_steps": passes}
            cases.append(self.case(self.engine, experiment, {"train": train}, size=f"{passes} an update"))
        return cases, {}

    @classmethod
    def findings(cls, outcome: TimedOutcome, folder: Path) -> Findings:
        """Loss and time of every case, and when each has the loss that all of them reach."""
        rows = [row_of(case, own) for case in outcome.cases if (own := by_round(outcome, case))]
        target = max(row.loss for row in rows)
        reached = sorted((row.seconds_to(target), row.passes) for row in rows)
        said = "; ".join(f"{seconds:.2f} s with {passes}" for seconds, passes in reached)
        lines = [
            Series(label=f"{row.passes} an update", x=row.seconds, y=row.losses, colour=place)
            for place, row in enumerate(rows)
        ]
        figure = Figure(title="Loss over time", caption=ABOUT, x="time (s)", y="loss", series=lines)
        return timed_findings(
            outcome,
            title=f"Passes of an update, {outcome.cases[0].engine} under {outcome.cases[0].layout}",
            sentence=f"loss {target:.3f} after {said}",
            about=[ABOUT],
            tables=[table_of("Equal tokens, in many updates or few", COLUMNS, rows)],
            figures=[figure],
            rows=rows,
        )


class Row(Struct, frozen=True, kw_only=True):
    """A number of passes an update: its `losses` at `seconds`, from the first eighth of all tokens on."""

    passes: int
    updates: int
    tokens_per_s: Estimate
    loss: float
    seconds: list[float]
    losses: list[float]

    def seconds_to(self, loss: float) -> float:
        """When it has this loss first; infinite if never."""
        pairs = zip(self.seconds, self.losses, strict=True)
        return next((at for at, value in pairs if value <= loss), math.inf)


COLUMNS = (
    Column[Row]("passes", lambda row: str(row.passes)),
    Column[Row]("updates", lambda row: row.updates, ",d"),
    Column[Row]("tokens/s", lambda row: row.tokens_per_s, ",.0f"),
    Column[Row]("s", lambda row: row.seconds[-1], ".2f"),
    Column[Row]("loss", lambda row: row.loss, ".4f"),
)


def row_of(case: TimedCase, own: Mapping[int, Measurement]) -> Row:
    """A case over its rounds: medians, and the losses of the first, which all others repeat."""
    train, found = case.experiment.train, next(iter(own.values())).losses
    update_s = statistics.median(one.wall_ms for one in own.values()) / 1e3
    eighth = max(train.max_iters // 8, 1)
    ends = range(eighth, train.max_iters + 1)
    losses = [statistics.fmean(found[end - eighth : end]) for end in ends]
    return Row(
        passes=train.gradient_accumulation_steps,
        updates=train.max_iters,
        tokens_per_s=estimate([case.experiment.tokens_per_step / one.wall_ms * 1e3 for one in own.values()]),
        loss=losses[-1],
        seconds=[end * update_s for end in ends],
        losses=losses,
    )
