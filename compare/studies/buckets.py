"""`shardpair buckets`: what gradient buckets cost on this machine, and what a closed form predicts.

    s    bytes of gradients                  w    bytes/s of a large all-reduce
    n    buckets, of s / n bytes each        o    seconds of an all-reduce beyond its bytes

A bucket leaves as soon as backward has filled it; collectives run one after the other, each for
s / (n w) + o. A step takes so much longer than its passes:

    overlapped    backward takes s / (n w) a bucket: the first is full after that, and from then
                  on the network is the slower by o a bucket                        s / (n w) + n o
    exposed       nothing runs beside backward: all are waited for                  s / w + n o

The first has a best n: sqrt(s / (w o)), buckets of sqrt(s w o) bytes, and an overhead of 2 sqrt(s o / w).

Source: buckets and overlap as in PyTorch's DDP (Li et al., arXiv 2006.15704, sections 3.2.2 and 3.2.3).
"""

import math
import shutil
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.collective_bench import OURS
from compare.execute.launch import EngineError
from compare.flags import pythons_of
from compare.judge.closed_forms.gradient_messages import gradient_messages
from compare.judge.collective_fit import Fit
from compare.judge.outcome import Grid, Outcome
from compare.judge.statistics import Estimate, estimate
from compare.judge.timed_outcome import timed
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.show.findings import Column, Findings, table_of, written
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.studies.collectives import fitted_all_reduce, sizes_between
from compare.studies.presets import spread, with_layout
from compare.study import OF_LAYOUTS
from compare.terminal import human_bytes
from compare.timing import Timed, timed_findings

ALONE = "no communication"
"""The variant that trains one rank's share of the batch on one rank."""
BUCKETED = "bucketed"
FILLED = (50, 20, 10, 5, 2)
SMALLEST_SIZE, LARGEST_SIZE = 2**10, 2**22
"""Bytes between which an all-reduce is timed at least, for its fit."""


class Buckets(Timed, frozen=True, kw_only=True):
    """Time data parallelism over bucket sizes, and hold the best one against a closed form.

    torch-manual's step with its gradients flat, naive, overlapped and in buckets, each in fresh processes, in
    rounds whose order rotates; less the step of one rank on the same tokens without communication. Beside it
    overhead(n) = s/(n w) + n o, with w and o from an all-reduce that is timed in the same run.

    Try:
      shardpair buckets demo --rounds 2
      shardpair buckets cpu --launcher slurm        # across the hosts of this allocation
    """

    bucket_mb: tuple[float, ...] = ()
    """Bucket sizes in MB (1e6 bytes). Default: those that gradients fill about 50, 20, 10, 5 and 2 of."""
    devices: int = 2
    """Ranks of data parallelism."""

    brief = "sizes of gradient buckets, beside a closed form"
    fixed: ClassVar = {**Timed.fixed, **OF_LAYOUTS, "layout.bucket_mb": None}

    def cases(self, experiment: Experiment) -> Grid:
        """Every way of reducing gradients, and the step without communication, in one block."""
        if self.devices < 2:
            raise ExperimentError(f"--devices {self.devices}: there is nothing to reduce on fewer than 2")
        single = spread(experiment, "single")
        batch = single.train.batch_size
        if batch % self.devices:
            raise ExperimentError(
                f"train.batch_size = {batch} is not divisible by --devices {self.devices}: change one of them"
            )
        share = revalidate(edited(single, {"train": {"batch_size": batch // self.devices}}))
        reduced = with_layout(single, dp_replicate=self.devices)
        # Others are held to the losses of the first.
        ways = {sync: with_layout(reduced, gradient_sync=sync) for sync in ("flat", "naive", "overlapped")}
        for mb in sorted(set(self.bucket_mb or default_bucket_mb(reduced))):
            ways[mb_text(mb)] = with_layout(reduced, gradient_sync=BUCKETED, bucket_mb=mb)
        layout, ways[ALONE] = f"ddp-{self.devices}", share
        cases = [self.case(REFERENCE, spec, layout=layout, variant=way) for way, spec in ways.items()]
        return {case.name: case for case in cases}, {}

    def after(self, outcome: Outcome, folder: Path) -> Outcome:
        """With the fit of our all-reduce up to the size of all gradients. Raises EngineError."""
        if "fit" in outcome.more:
            return outcome
        place, reduced = folder / "collectives", next(iter(outcome.cases.values())).experiment
        shutil.rmtree(place, ignore_errors=True)  # what an interrupted study has left
        fit = fitted_all_reduce(
            OURS,
            sizes_between(SMALLEST_SIZE, max(LARGEST_SIZE, gradient_bytes(reduced))),
            place,
            ranks=reduced.layout.devices,
            platform=self.platform,
            timeout_s=self.timeout_s,
            pythons=pythons_of(self),
            hosts=self.found_hosts(),
        )
        return replace(outcome, more={**outcome.more, "fit": msgspec.to_builtins(fit)})

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Overheads over bucket sizes, beside the closed forms."""
        *_, alone = outcome.cases
        if alone not in outcome.finished or len(outcome.finished) < 2 or "fit" not in outcome.more:
            raise EngineError("; ".join(outcome.failures.values()) or "too few cases finished", exit_code=1)
        fit = msgspec.convert(outcome.more["fit"], Fit)
        size = gradient_bytes(next(iter(outcome.cases.values())).experiment)
        alone_ms, points = points_of(outcome, fit)
        buckets, measured = best_buckets(size, fit), "none was measured"
        if bucketed := [point for point in points if point.gradient_sync == BUCKETED]:
            best = min(bucketed, key=lambda point: point.overhead_ms.median)
            measured = f"measured best {best.name}: {written(best.overhead_ms, '.1f')} ms beyond "
            measured += f"{alone_ms:.1f} ms without communication"
        title = f"Data parallelism over {fit.ranks} ranks, {human_bytes(size)} of gradients"
        rate = f"{fit.bandwidth_gb_s:.2f} GB/s" if fit.bandwidth_gb_s else "without limit"
        return timed_findings(
            timed(outcome),
            title=title,
            sentence=f"predicted best bucket {mb_text(size / buckets / 1e6)}; {measured}",
            about=[
                f"Overhead is a step less {alone_ms:.1f} ms, the step of one rank on the same tokens without "
                f"communication: with what ranks that share cores and memory take from each other.",
                f"An all-reduce on {fit.ranks} ranks here: o = {fit.latency_us:,.0f} us, w = {rate} (median "
                f"misfit {fit.misfit:.0%}). Predicted best: {buckets:.1f} buckets.",
            ],
            tables=[table_of(title, COLUMNS, points)],
            rows=points,
            value={"alone_ms": alone_ms, "fit": fit, "best_bucket_mb": size / buckets / 1e6},
        )


class Point(Struct, frozen=True, kw_only=True):
    """One way of reducing gradients: its measured overhead, and what the closed forms say of it."""

    name: str
    gradient_sync: str
    buckets: int
    wall_ms: float
    """Of a step, the median over rounds."""
    overhead_ms: Estimate
    """A step less the one without communication, round by round."""
    overlapped_ms: float | None
    """None where nothing is reduced during backward."""
    exposed_ms: float


COLUMNS = (
    Column[Point]("gradients", lambda point: point.name),
    Column[Point]("buckets", lambda point: point.buckets, "d"),
    Column[Point]("ms/step", lambda point: point.wall_ms, ".1f"),
    Column[Point]("overhead ms", lambda point: point.overhead_ms, ".1f"),
    Column[Point]("overlapped: s/(n w) + n o", lambda point: point.overlapped_ms, ".1f"),
    Column[Point]("exposed: s/w + n o", lambda point: point.exposed_ms, ".1f"),
)


def overlapped_ms(size: float, buckets: float, fit: Fit) -> float:
    """Overhead where backward takes as long for a bucket as its bytes do."""
    return size / (buckets * fit.bytes_per_s) * 1e3 + buckets * fit.latency_us / 1e3


def exposed_ms(size: float, buckets: float, fit: Fit) -> float:
    """Overhead where nothing runs beside backward."""
    return size / fit.bytes_per_s * 1e3 + buckets * fit.latency_us / 1e3


def best_buckets(size: float, fit: Fit) -> float:
    """The number of buckets with the least `overlapped_ms`: at least 1; infinite without latency."""
    if not fit.latency_us:
        return math.inf
    return max(math.sqrt(size / (fit.bytes_per_s * fit.latency_us / 1e6)), 1.0)


def points_of(outcome: Outcome, fit: Fit) -> tuple[float, list[Point]]:
    """The step without communication (ms), and a point for each way that was timed beside it in a round."""
    view, points = timed(outcome), []
    *ways, alone = outcome.cases.values()
    without = {number: process.wall_ms for number, process in view.rounds_of(alone).items()}
    for case in ways:
        steps = {number: process.wall_ms for number, process in view.rounds_of(case).items()}
        if rounds := sorted(steps.keys() & without.keys()):
            sync = case.experiment.layout.gradient_sync
            size, buckets = gradient_bytes(case.experiment), buckets_of(case.experiment)
            overlaps = sync in (BUCKETED, "overlapped")
            point = Point(
                name=case.variant,
                gradient_sync=sync,
                buckets=buckets,
                wall_ms=estimate(list(steps.values())).median,
                overhead_ms=estimate([steps[number] - without[number] for number in rounds]),
                overlapped_ms=overlapped_ms(size, buckets, fit) if overlaps else None,
                exposed_ms=exposed_ms(size, buckets, fit),
            )
            points.append(point)
    return estimate(list(without.values())).median, points


def buckets_of(experiment: Experiment) -> int:
    """All-reduces of a step."""
    messages = gradient_messages(REFERENCE, experiment, gradient_sync=experiment.layout.gradient_sync)
    assert messages  # gradients of replicas
    return len(messages.by_stage[0])


def gradient_bytes(experiment: Experiment) -> int:
    """Bytes of all gradients."""
    return parameter_count(experiment.model) * storage_dtype(experiment).itemsize


def default_bucket_mb(reduced: Experiment) -> tuple[float, ...]:
    """Megabytes of which the gradients fill about so many buckets as `FILLED` says."""
    return tuple(float(f"{gradient_bytes(reduced) / 1e6 / buckets:.2g}") for buckets in FILLED)


def mb_text(megabytes: float) -> str:
    """A size of a bucket: 2.5 MB; more precision would say nothing."""
    return f"{megabytes:.3g} MB"
