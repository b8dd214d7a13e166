"""Intervals over rounds: they hold the truth about as often as they say, and claim nothing from too few."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.judge.statistics import (
    MIN_ROUNDS,
    coverage,
    estimate,
    rank_of,
)

positive = st.floats(0.01, 100.0)


def test_coverage_is_exact_whatever_the_noise():
    """Two of the values around the median, as often as `coverage` says, by simulation of skewed noise."""
    random, trials = np.random.default_rng(0), 20_000
    for rounds in (5, 7, 8, 9, 13, 20):
        rank = rank_of(rounds)
        drawn = np.sort(random.lognormal(sigma=0.5, size=(trials, rounds)), axis=1)  # whose median is 1
        held = np.mean((drawn[:, rank - 1] <= 1) & (drawn[:, -rank] >= 1))
        assert abs(held - coverage(rounds, rank)) < 4 * (0.25 / trials) ** 0.5, rounds
        assert estimate(drawn[0]).low == drawn[0, rank - 1]
        assert estimate(drawn[0]).high == drawn[0, -rank]


def test_more_rounds_never_make_an_interval_less_sure():
    sure = {rounds: coverage(rounds, rank_of(rounds)) for rounds in range(MIN_ROUNDS, 60)}
    assert min(sure.values()) == sure[MIN_ROUNDS] == 1 - 2 / 2**5
    assert all(coverage(rounds, rank_of(rounds) + 1) < sure[MIN_ROUNDS] for rounds in sure)
    assert [rank_of(rounds) for rounds in range(MIN_ROUNDS)] == [0] * MIN_ROUNDS


def test_an_engine_against_itself_holds_one():
    random = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        drift = np.exp(random.normal(scale=0.5, size=5))  # of the machine, from round to round
        a, b = (drift * random.lognormal(sigma=0.02, size=5) for _ in range(2))
        found = estimate(a / b)
        held += found.low <= 1.0 <= found.high
        assert found.median == pytest.approx(1.0, abs=0.1)  # the drift counts for neither
    assert held >= 85


@given(st.lists(positive, min_size=1, max_size=12))
def test_interval_is_around_the_median_and_within_the_values(values):
    found = estimate(values)
    assert found.rounds == len(values)
    assert (found.low is not None) == (len(values) >= MIN_ROUNDS)
    if found.low is not None:
        assert min(values) <= found.low <= found.median <= found.high <= max(values)
        assert estimate(values) == found
