"""Ratios of two cases over rounds: their median and its interval.

A ratio is taken within a round, whose processes ran close to each other in time. So it does not change if the
machine slows down between two rounds. Two processes of the same program differ by more than two steps of a
process, so an interval is over rounds. 95 % intervals over steps contained the true value in less than half
of all cases.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

MIN_ROUNDS = 5


class Estimate(Struct, frozen=True, kw_only=True):
    """A median over rounds, and an interval for it."""

    median: float
    rounds: int
    low: float | None = None
    """Ends of the interval; None for fewer than `MIN_ROUNDS` rounds, which give no interval."""
    high: float | None = None


def coverage(rounds: int, rank: int) -> float:
    """Probability that the `rank`-th smallest and the `rank`-th largest value enclose the true median.

    Exact for independent values of any continuous distribution: each is below the median with 1/2 (the sign
    test). 0.9375 for the extremes of five.
    """
    return 1.0 - 2.0 * sum(math.comb(rounds, below) for below in range(rank)) / 2.0**rounds


CONFIDENCE = coverage(MIN_ROUNDS, 1)
"""Least coverage of every interval. More rounds make it narrower, with at least this coverage."""


def rank_of(rounds: int) -> int:
    """Rank of the narrowest interval that covers the median with `CONFIDENCE`; 0 if no interval does."""
    ranks = range(1, rounds // 2 + 1)
    return max((rank for rank in ranks if coverage(rounds, rank) >= CONFIDENCE), default=0)


def interval_words(estimates: Iterable[Estimate]) -> str:
    """Coverage and rounds of some estimates' intervals: 93.8 % intervals of 5 rounds."""
    rounds = sorted({one.rounds for one in estimates if one.low is not None})
    if not rounds:
        return f"left out: fewer than {MIN_ROUNDS} rounds give no interval"
    covered = {count: coverage(count, rank_of(count)) for count in rounds}
    return ", ".join(f"{100 * share:.1f} % intervals of {count} rounds" for count, share in covered.items())


def estimate(values: Sequence[float]) -> Estimate:
    """The median of one value per round, with the sign test's interval, whose ends are two of the values.

    Only independent rounds are assumed, and the coverage is exact. The
    percentile bootstrap at 95 % has the same ends for five rounds, and covers 87.5 % with seven.
    """
    ordered = sorted(map(float, values))
    rank = rank_of(len(ordered))
    ends = {"low": ordered[rank - 1], "high": ordered[-rank]} if rank else {}
    return Estimate(median=statistics.median(ordered), rounds=len(ordered), **ends)
