"""Ratios of two cases over rounds: their median, and how surely it is known.

A ratio is taken within a round, whose processes ran close to each other in time: a machine that slows down
between two rounds then counts for neither. Rounds are what varies: two processes of the same program differ
(in memory, in what the kernel does) by more than two steps of a process. So rounds are resampled and not
steps; 95 % intervals over the steps of one process held the truth in less than half of all cases.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

MIN_ROUNDS = 5
CONFIDENCE = 0.95
RESAMPLES = 4999


class Estimate(Struct, frozen=True, kw_only=True):
    """A median over rounds, and an interval for it."""

    median: float
    rounds: int
    low: float | None = None
    """None for fewer than `MIN_ROUNDS` rounds: from so few no interval can be told."""
    high: float | None = None

    @property
    def has_interval(self) -> bool:
        """True if there were rounds enough for an interval."""
        return self.low is not None

    def overlaps(self, other: "Estimate") -> bool:
        """True if both intervals have a value in common. False where one is missing."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.low <= other.high and other.low <= self.high

    def holds(self, value: float) -> bool:
        """True if the value lies in the interval. False where there is none."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def ratios(ours: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Ours over the baseline's, for each round that has both.

    Args:
        ours, baseline: a positive figure for each round.
    """
    return [ours[number] / baseline[number] for number in sorted(ours.keys() & baseline.keys())]


def estimate(values: Sequence[float]) -> Estimate:
    """The median of one value a round, with a bootstrap interval at `CONFIDENCE`.

    The interval is the percentile bootstrap's. BCa would correct it by how the median moves when one round
    is left out, and a median of five hardly moves: that correction is noise. For five rounds the percentiles
    are the smallest and the largest value, which hold the true median with 1 - 2 / 2^5 = 94 %, whatever the
    distribution. The same values give the same interval.

    Args:
        values: at least one.

    Returns:
        Without an interval if there are fewer than `MIN_ROUNDS`.
    """
    median = float(np.median(values))
    if len(values) < MIN_ROUNDS:
        return Estimate(median=median, rounds=len(values))
    from scipy.stats import bootstrap  # takes a second to import

    found = bootstrap(
        (np.asarray(values),),
        np.median,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    # Between two equal values scipy interpolates to one that may be a rounding error beside them.
    low = float(np.clip(found.low, min(values), median))
    high = float(np.clip(found.high, median, max(values)))
    return Estimate(median=median, rounds=len(values), low=low, high=high)
