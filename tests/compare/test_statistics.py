"""Intervals over rounds contain the true median with their stated coverage; few rounds give none."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compare.show.statistics import (
    MIN_ROUNDS,
    coverage,
    estimate,
    rank_of,
)

positive = st.floats(0.01, 100.0)


def test_coverage_is_exact_for_any_noise():
    """Simulation of skewed noise: two of the values enclose the median with `coverage`."""
    random, trials = np.random.default_rng(0), 20_000
    for rounds in (5, 7, 8, 9, 13, 20):
        rank = rank_of(rounds)
        drawn = np.sort(random.lognormal(sigma=0.5, size=(trials, rounds)), axis=1)  # whose median is 1
        held = np.mean((drawn[:, rank - 1] <= 1) & (drawn[:, -rank] >= 1))
        assert abs(held - coverage(rounds, rank)) < 4 * (0.25 / trials) ** 0.5, rounds
        assert estimate(drawn[0]).low == drawn[0, rank - 1]
        assert estimate(drawn[0]).high == drawn[0, -rank]


def test_more_rounds_keep_the_coverage():
    sure = {rounds: coverage(rounds, rank_of(rounds)) for rounds in range(MIN_ROUNDS, 60)}
    assert min(sure.values()) == sure[MIN_ROUNDS] == 1 - 2 / 2**5
    assert all(coverage(rounds, rank_of(rounds) + 1) < sure[MIN_ROUNDS] for rounds in sure)
    assert [rank_of(rounds) for rounds in range(MIN_ROUNDS)] == [0] * MIN_ROUNDS


@given(st.lists(positive, min_size=1, max_size=12))
def test_interval_contains_the_median(values):
    found = estimate(values)
    assert found.rounds == len(values)
    assert (found.low is not None) == (len(values) >= MIN_ROUNDS)
    if found.low is not None:
        assert min(values) <= found.low <= found.median <= found.high <= max(values)
        assert estimate(values) == found
