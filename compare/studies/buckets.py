"""`shardpair buckets`: what gradient buckets cost on this machine, and what a closed form predicts."""

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from compare.contract.collective_bench import OURS
from compare.execute.launch import EngineError
from compare.execute.load import busy_cores
from compare.flags.pythons import pythons_of
from compare.judge.bucket_overheads import (
    ALONE,
    BUCKETED,
    BucketPrediction,
    Point,
    best_of,
    default_bucket_mb,
    gradient_bytes,
    line_of,
    overheads_of,
    reduced_experiment,
)
from compare.judge.collective_fit import Fit
from compare.judge.outcome import OUTCOME, Grid, Outcome, read_outcome
from compare.judge.statistics import interval_words
from compare.judge.timed_outcome import timed
from compare.show.figures import INK, WIDE, Figure, colour, log_scale, whiskers
from compare.show.findings import Column, Findings, table_of, written
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.studies.collective_runs import (
    Order,
    bench_of,
    requests_of,
    run_requests,
    sizes_between,
)
from compare.studies.presets import spread, with_layout
from compare.study import OF_LAYOUTS
from compare.terminal import human_bytes
from compare.timing import Timed, timed_findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHERS = ("flat", "naive", "overlapped")
"""Of the first the losses are what others are held to."""
MARKS = {BUCKETED: "o", "overlapped": "s", "flat": "^", "naive": "D"}
SMALLEST_SIZE, LARGEST_SIZE = 2**10, 2**22
"""Bytes between which an all-reduce is timed at least, for its fit."""
COLLECTIVES = "collectives"
"""Folder of its times, in that of the study."""


class Buckets(Timed, frozen=True, kw_only=True):
    """Time data parallelism over bucket sizes, and hold the best one against a closed form.

    torch-manual's step with its gradients flat, naive, overlapped and in buckets, each in fresh processes, in
    rounds whose order rotates; less the step of one rank on the same tokens without communication. Beside it
    overhead(n) = s/(n w) + n o, with w and o from an all-reduce that is timed in the same run.

    Try:
      shardpair buckets demo --rounds 2
      shardpair buckets baby-gpt --train.batch_size 4 --bucket_mb 1 2.5 5 10 25
      shardpair buckets cpu --launcher slurm        # across the hosts of this allocation
    """

    bucket_mb: tuple[float, ...] = ()
    """Bucket sizes in MB (1e6 bytes). Default: round numbers of which the gradients fill 2 to 50, but none
    that makes the same buckets as another."""
    devices: int = 2
    """Ranks of data parallelism."""

    brief = "sizes of gradient buckets, beside a closed form"
    fixed: ClassVar = {**Timed.fixed, **OF_LAYOUTS, "layout.bucket_mb": None}

    def cases(self, experiment: Experiment) -> Grid:
        """Every way of reducing gradients, and the step without communication, in one block."""
        if self.devices < 2:
            raise ExperimentError(f"--devices {self.devices}: there is nothing to reduce on fewer than 2")
        if len(set(self.bucket_mb)) < len(self.bucket_mb):
            given = " ".join(f"{mb:g}" for mb in self.bucket_mb)
            raise ExperimentError(f"--bucket_mb {given}: give each once")
        single = spread(edited(experiment, {"train": {"max_iters": self.timing.steps}}), "single")
        batch = single.train.batch_size
        if batch % self.devices:
            raise ExperimentError(
                f"train.batch_size = {batch} is not divisible by --devices {self.devices}: change one of them"
            )
        share = revalidate(edited(single, {"train": {"batch_size": batch // self.devices}}))
        reduced = with_layout(single, dp_replicate=self.devices)
        ways = {sync: with_layout(reduced, gradient_sync=sync) for sync in OTHERS}
        for mb in sorted(self.bucket_mb or default_bucket_mb(experiment)):
            ways[mb_text(mb)] = with_layout(reduced, gradient_sync=BUCKETED, bucket_mb=mb)
        layout = f"ddp-{self.devices}"
        cases = [
            self.case(REFERENCE, whole, layout=layout, variant=variant)
            for variant, whole in {**ways, ALONE: share}.items()
        ]
        return {case.name: case for case in cases}, {}

    def after(self, outcome: Outcome, folder: Path) -> Outcome:
        """Time our all-reduce up to the size of all gradients, unless the folder has its times.

        Raises:
            EngineError: it did not finish, or gave wrong results.
        """
        place, reduced = folder / COLLECTIVES, reduced_experiment(timed(outcome))
        if not (place / OUTCOME).is_file() or not bench_of(read_outcome(place)).passed:
            shutil.rmtree(place, ignore_errors=True)  # what an interrupted study has left
            order = Order(
                kinds=("all_reduce",),
                implementations=(OURS,),
                sizes=sizes_between(SMALLEST_SIZE, max(LARGEST_SIZE, gradient_bytes(reduced)), 4),
                ranks=(reduced.layout.devices,),
                platform=self.platform,
                timeout_s=self.timeout_s,
                hosts=self.found_hosts(),
            )
            run_requests(
                *requests_of(order),
                command="",
                run_dir=str(place),
                busy=busy_cores(),
                pythons=pythons_of(self),
                quiet=self.quiet,
                hosts=order.hosts,
            )
        kept_fit(folder)
        return outcome

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Overheads over bucket sizes, beside the closed forms."""
        if len(outcome.finished) < 2 or list(outcome.cases)[-1] not in outcome.finished:  # no overhead
            raise EngineError("; ".join(outcome.failures.values()) or "too few cases finished", exit_code=1)
        view = timed(outcome)
        line = line_of(reduced_experiment(view), kept_fit(folder))
        alone_ms, points = overheads_of(view, line)
        ranks = line.fit.ranks
        title = f"Data parallelism over {ranks} ranks, {human_bytes(line.gradient_bytes)} of gradients"
        return timed_findings(
            view,
            outcome,
            title=title,
            sentence=sentence_of(points, line, alone_ms),
            about=[
                f"Overhead is a step less {alone_ms:.1f} ms, the step of one rank on the same tokens without "
                f"communication; so it holds, too, what ranks that share cores and memory take from each "
                f"other. {outcome.finished_rounds} rounds of fresh processes.",
                f"An all-reduce on {ranks} ranks here: {line.words()}",
            ],
            tables=[table_of(title, COLUMNS, points)],
            figures=[figure_of(points, line)],
            rows=points,
            alone_ms=alone_ms,
            prediction=line,
        )


COLUMNS = (
    Column[Point]("gradients", lambda point: point.name),
    Column[Point]("buckets", lambda point: point.buckets, "d"),
    Column[Point]("ms/step", lambda point: point.wall_ms, ".1f"),
    Column[Point]("overhead ms", lambda point: point.overhead_ms, ".1f"),
    Column[Point]("overlapped: s/(n w) + n o", lambda point: point.overlapped_ms, ".1f"),
    Column[Point]("exposed: s/w + n o", lambda point: point.exposed_ms, ".1f"),
)


def sentence_of(points: list[Point], line: BucketPrediction, alone_ms: float) -> str:
    """The outcome in a line."""
    predicted = f"predicted best bucket {mb_text(line.best_bucket_mb)}"
    if (best := best_of(points)) is None:
        return f"{predicted}; none was measured"
    ms, space, interval = written(best.overhead_ms, ".1f").partition(" ")
    return (
        f"{predicted}; measured best {best.name}: {ms} ms{space}{interval} beyond {alone_ms:.1f} ms without "
        f"communication"
    )


def figure_of(points: list[Point], line: BucketPrediction) -> Figure:
    """Measured overheads over bucket size, and the closed forms' curves."""
    size_mb, most = line.gradient_bytes / 1e6, max([1.0, *(point.buckets for point in points)])
    counts = np.geomspace(1, max(most, line.best_buckets) if math.isfinite(line.best_buckets) else 100, 200)
    curves = {
        "overlapped: s/(n w) + n o": ("-", line.overlapped_ms),
        "exposed: s/w + n o": (":", line.exposed_ms),
    }
    best = best_of(points)

    def draw(axes: "Axes") -> None:
        axes.axhline(0.0, color=INK, linewidth=0.8)
        for place, (sync, mark) in enumerate(MARKS.items()):
            if of_sync := [point for point in points if point.gradient_sync == sync]:
                sizes = [size_mb / point.buckets for point in of_sync]
                overheads = [point.overhead_ms for point in of_sync]
                medians = [one.median for one in overheads]
                axes.errorbar(
                    sizes,
                    medians,
                    whiskers(overheads),
                    fmt=mark,
                    color=colour(place),
                    capsize=3,
                    label=f"measured, {sync}",
                )
        for name, (dash, form) in curves.items():
            values = [form(count) for count in counts]
            axes.plot(size_mb / counts, values, dash, color=INK, label=f"closed form, {name}")
        if math.isfinite(line.best_buckets):
            label = f"predicted best: {mb_text(line.best_bucket_mb)}"
            axes.axvline(line.best_bucket_mb, linestyle="--", color=colour(4), label=label)
        if best:
            label = f"measured best: {best.name} asked for, {best.buckets} buckets"
            axes.axvline(size_mb / best.buckets, linestyle="--", color=colour(0), label=label)
        axes.set(xlabel="bucket size (MB)", ylabel="overhead of a step (ms)")
        log_scale(axes, "x")

    return Figure(
        title="Overhead over bucket size",
        caption=(
            f"Medians over rounds; whiskers are {interval_words(point.overhead_ms for point in points)}. The "
            f"lines are closed forms: overlapped if backward takes as long for a bucket as its bytes do, "
            f"exposed if nothing runs beside backward. A size is the gradients over the number of buckets."
        ),
        draw=draw,
        width=WIDE,
        height=4.0,
    )


def kept_fit(folder: Path) -> Fit:
    """The fit of a study's all-reduce.

    Raises:
        RecordError: it was not timed.
        EngineError: it did not finish, or gave wrong results.
    """
    bench = bench_of(read_outcome(folder / COLLECTIVES))
    if not bench.passed or not bench.fits:
        raise EngineError(f"all_reduce: {bench.sentence()}", exit_code=1)
    return bench.fits[0]


def mb_text(megabytes: float) -> str:
    """A size of a bucket: 2.5 MB; more precision would say nothing."""
    return f"{megabytes:.3g} MB"
