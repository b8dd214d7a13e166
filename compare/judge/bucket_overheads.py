"""Overheads of reducing gradients: what was measured, beside the closed forms of a fitted all-reduce."""

import math

from msgspec import Struct

from compare.judge.closed_forms.buckets import best_buckets, bucket_sizes, exposed_s, overlapped_s
from compare.judge.collective_fit import Fit
from compare.judge.outcome import Case
from compare.judge.statistics import Estimate, estimate
from compare.judge.timed_outcome import TimedOutcome
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.spec.experiment import Experiment

ALONE = "no communication"
"""The variant that trains one rank's share of the batch on one rank."""
BUCKETED = "bucketed"
STEPS_OF_TEN = (1.0, 2.5, 5.0)
MOST_BUCKETS = 50


class BucketPrediction(Struct, frozen=True, kw_only=True):
    """What the closed forms say of s bytes of gradients, if a call takes o + bytes / w."""

    gradient_bytes: int
    """s."""
    fit: Fit
    """o and w: of an all-reduce on this machine."""
    best_buckets: float
    best_bucket_mb: float
    best_overhead_ms: float

    def overlapped_ms(self, buckets: float) -> float:
        """Overhead where backward takes as long for a bucket as its bytes do."""
        return overlapped_s(self.gradient_bytes, buckets, **fitted(self.fit)) * 1e3

    def exposed_ms(self, buckets: float) -> float:
        """Overhead where nothing runs beside backward."""
        return exposed_s(self.gradient_bytes, buckets, **fitted(self.fit)) * 1e3

    def words(self) -> str:
        """The fit, and the best number of buckets by it."""
        bandwidth = f"{self.fit.bytes_per_s / 1e9:.2f} GB/s" if self.fit.bandwidth_gb_s else "without limit"
        return (
            f"o = {self.fit.latency_us:,.0f} us, w = {bandwidth} (median misfit {self.fit.misfit:.0%}). "
            f"Predicted best: {self.best_buckets:.1f} buckets, {self.best_overhead_ms:.1f} ms."
        )


class Point(Struct, frozen=True, kw_only=True):
    """One way of reducing gradients: its measured overhead, and what the closed forms say of it."""

    name: str
    gradient_sync: str
    bucket_mb: float | None
    """The limit asked for; None where there is none to ask for."""
    buckets: int
    wall_ms: float
    """Of a step, the median over rounds."""
    overhead_ms: Estimate
    """A step less the one without communication, round by round."""
    overlapped_ms: float | None
    """None where nothing is reduced during backward."""
    exposed_ms: float


def line_of(experiment: Experiment, fit: Fit) -> BucketPrediction:
    """The closed forms for an experiment's gradients and a fitted all-reduce."""
    size = gradient_bytes(experiment)
    best = best_buckets(size, **fitted(fit))
    least_ms = overlapped_s(size, best, **fitted(fit)) * 1e3
    return BucketPrediction(
        gradient_bytes=size,
        fit=fit,
        best_buckets=best,
        best_bucket_mb=size / best / 1e6,
        best_overhead_ms=least_ms,
    )


def overheads_of(outcome: TimedOutcome, line: BucketPrediction) -> tuple[float, list[Point]]:
    """The step without communication (ms), and a point for each way that was timed beside it in a round."""
    walls: dict[str, dict[int, float]] = {}
    for one in outcome.measurements:
        walls.setdefault(one.case, {})[one.round] = one.wall_ms
    *ways, alone = outcome.cases
    without = walls[alone.name]
    points = []
    for case in ways:
        own = walls.get(case.name, {})
        if both := sorted(own.keys() & without.keys()):
            overhead = estimate([own[number] - without[number] for number in both])
            points.append(_point(case, estimate(list(own.values())).median, overhead, line))
    return estimate(list(without.values())).median, points


def _point(case: Case, wall_ms: float, overhead_ms: Estimate, line: BucketPrediction) -> Point:
    layout, buckets = case.experiment.layout, buckets_of(case)
    return Point(
        name=case.variant,
        gradient_sync=layout.gradient_sync,
        bucket_mb=layout.bucket_mb if layout.gradient_sync == BUCKETED else None,
        buckets=buckets,
        wall_ms=wall_ms,
        overhead_ms=overhead_ms,
        overlapped_ms=line.overlapped_ms(buckets)
        if layout.gradient_sync in (BUCKETED, "overlapped")
        else None,
        exposed_ms=line.exposed_ms(buckets),
    )


def best_of(points: list[Point]) -> Point | None:
    """The bucketed point with the least overhead."""
    bucketed = [point for point in points if point.gradient_sync == BUCKETED]
    return min(bucketed, key=lambda point: point.overhead_ms.median, default=None)


def buckets_of(case: Case) -> int:
    """Number of buckets that a case reduces."""
    experiment, layout = case.experiment, case.experiment.layout
    limit = {BUCKETED: layout.bucket_mb * 1e6, "flat": math.inf}.get(layout.gradient_sync, 0.0)
    return len(bucket_sizes(experiment.model, limit=limit, itemsize=storage_dtype(experiment).itemsize))


def reduced_experiment(outcome: TimedOutcome) -> Experiment:
    """The experiment of a case that reduces gradients: its model, and the ranks."""
    return outcome.cases[0].experiment


def gradient_bytes(experiment: Experiment) -> int:
    """Bytes of all gradients."""
    return parameter_count(experiment.model) * storage_dtype(experiment).itemsize


def fitted(fit: Fit) -> dict[str, float]:
    """w and o of a fit, as the closed forms take them."""
    return {"bandwidth": fit.bytes_per_s, "latency_s": fit.latency_us / 1e6}


def default_bucket_mb(experiment: Experiment) -> tuple[float, ...]:
    """Round numbers of megabytes, of which the gradients fill 2 to `MOST_BUCKETS`, each in another way."""
    itemsize = storage_dtype(experiment).itemsize
    whole = gradient_bytes(experiment) / 1e6
    tens = [10.0**power for power in range(-3, math.ceil(math.log10(whole)) + 1)]
    sizes = [round(step * ten, 6) for ten in tens for step in STEPS_OF_TEN]
    fitting = [size for size in sizes if whole / MOST_BUCKETS <= size <= whole / 2]
    different = {
        tuple(bucket_sizes(experiment.model, limit=size * 1e6, itemsize=itemsize)): size
        for size in reversed(fitting)  # of several that make the same buckets, the smallest
    }
    return tuple(sorted(different.values())) or (max(whole, 0.001),)
