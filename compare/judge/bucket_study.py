"""What buckets cost: measured overheads of data parallelism, and what the closed forms make of the fit."""

import math
from pathlib import Path

from msgspec import Struct

from compare.host.json_files import write_json
from compare.judge.bench import BenchCase, BenchResult
from compare.judge.closed_forms.buckets import best_bucket_bytes, best_buckets, bucket_sizes, overlapped_s
from compare.judge.collective_fit import Fit
from compare.judge.statistics import Estimate, estimate
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.spec.experiment import Layout

RESULT = "buckets.json"
ALONE = "no communication"
"""The variant that trains one rank's share of the batch on one rank."""
BUCKETED = "bucketed"


class Point(Struct, frozen=True, kw_only=True):
    """One way of reducing gradients."""

    name: str
    gradient_sync: str
    bucket_mb: float | None
    """The limit asked for; None where there is none to ask for."""
    buckets: int
    wall_ms: float
    """Of a step, the median over rounds."""
    overhead_ms: Estimate
    """A step less the one without communication, round by round."""


class BucketStudy(Struct, frozen=True, kw_only=True):
    """Overheads over buckets, and the prediction: buckets.json."""

    devices: int
    gradient_bytes: int
    """s of the closed forms."""
    fit: Fit
    """o and w of the closed forms: an all-reduce on this machine."""
    alone_ms: float
    """Step of one rank with one rank's share of the batch."""
    points: list[Point]
    predicted_buckets: float
    predicted_bucket_mb: float
    predicted_overhead_ms: float

    @property
    def best(self) -> Point | None:
        """The bucketed point with the least overhead."""
        bucketed = [point for point in self.points if point.gradient_sync == BUCKETED]
        return min(bucketed, key=lambda point: point.overhead_ms.median, default=None)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the fit; infinite where time does not grow with size."""
        return self.fit.bytes_per_s

    @property
    def latency_s(self) -> float:
        """Seconds of an all-reduce beyond its bytes."""
        return self.fit.latency_us / 1e6

    def sentence(self) -> str:
        """The outcome in a line."""
        predicted = f"predicted best bucket {mb_text(self.predicted_bucket_mb)}"
        if self.best is None or self.best.bucket_mb is None:
            return f"{predicted}; none was measured"
        overhead = self.best.overhead_ms
        interval = f" [{overhead.low:.1f}, {overhead.high:.1f}]" if overhead.has_interval else ""
        return (
            f"{predicted}; measured best {mb_text(self.best.bucket_mb)}: {overhead.median:.1f} ms{interval} "
            f"beyond {self.alone_ms:.1f} ms without communication"
        )


def mb_text(megabytes: float) -> str:
    """A size of a bucket: 2.5 MB; more precision would say nothing."""
    return f"{megabytes:.3g} MB"


def buckets_of(case: BenchCase) -> int:
    """Number of buckets that a case reduces."""
    experiment = case.experiment
    limit = bucket_limit(experiment.layout)
    return len(bucket_sizes(experiment.model, limit=limit, itemsize=storage_dtype(experiment).itemsize))


def bucket_limit(layout: Layout) -> float:
    """Bytes that a bucket of this synchronisation may hold."""
    return {BUCKETED: layout.bucket_mb * 1e6, "flat": math.inf}.get(layout.gradient_sync, 0.0)


def study_of(result: BenchResult, fit: Fit) -> BucketStudy:
    """Put the overheads of a bench and a fitted all-reduce together. Cases without a round are left out.

    Args:
        result: whose case `ALONE` has at least one measurement.
        fit: of an all-reduce on as many ranks.
    """
    walls: dict[str, dict[int, float]] = {}
    for one in result.measurements:
        walls.setdefault(one.case, {})[one.round] = one.wall_ms
    (alone,) = (case for case in result.cases if case.variant == ALONE)
    without = walls[alone.name]
    points = [
        _point(case, walls[case.name], without)
        for case in result.cases
        if case is not alone and walls.get(case.name, {}).keys() & without.keys()
    ]
    experiment = next(case.experiment for case in result.cases if case is not alone)
    size = parameter_count(experiment.model) * storage_dtype(experiment).itemsize
    line = {
        "bandwidth": fit.bytes_per_s,
        "latency_s": fit.latency_us / 1e6,
    }
    best = best_buckets(size, **line)
    return BucketStudy(
        devices=experiment.layout.devices,
        gradient_bytes=size,
        fit=fit,
        alone_ms=estimate(list(without.values())).median,
        points=points,
        predicted_buckets=best,
        predicted_bucket_mb=best_bucket_bytes(size, **line) / 1e6,
        predicted_overhead_ms=overlapped_s(size, best, **line) * 1e3,
    )


def save(study: BucketStudy, folder: Path) -> None:
    """Write buckets.json."""
    write_json(folder / RESULT, study)


def _point(case: BenchCase, own: dict[int, float], without: dict[int, float]) -> Point:
    layout = case.experiment.layout
    return Point(
        name=case.variant,
        gradient_sync=layout.gradient_sync,
        bucket_mb=layout.bucket_mb if layout.gradient_sync == BUCKETED else None,
        buckets=buckets_of(case),
        wall_ms=estimate(list(own.values())).median,
        overhead_ms=estimate(
            [own[number] - without[number] for number in sorted(own.keys() & without.keys())]
        ),
    )
