"""The closed forms of buckets, against a clock that carries out what they describe."""

import itertools
import math

import pytest

from compare.judge.closed_forms.buckets import (
    best_buckets,
    exposed_s,
    hidden_s,
    overlapped_s,
)

SIZE, BANDWIDTH, LATENCY = 40e6, 2e9, 1e-4
LINE = {"bandwidth": BANDWIDTH, "latency_s": LATENCY}


def clock_s(buckets: int, *, backward_s: float, beside: bool) -> float:
    """Seconds of a step beyond its backward: each bucket is reduced after it is full, and after those before.

    Args:
        buckets: equal ones.
        backward_s: of one bucket.
        beside: whether collectives run beside backward.
    """
    network_s = 0.0
    for number in range(1, buckets + 1):
        full_s = number * backward_s if beside else buckets * backward_s
        network_s = max(network_s, full_s) + SIZE / buckets / BANDWIDTH + LATENCY
    return network_s - buckets * backward_s


@pytest.mark.parametrize("buckets", [1, 2, 7, 14, 40])
def test_the_forms_are_what_the_clock_says(buckets):
    transfer_s = SIZE / buckets / BANDWIDTH
    found = clock_s(buckets, backward_s=transfer_s, beside=True)
    assert overlapped_s(SIZE, buckets, **LINE) == pytest.approx(found)
    for slower in (1.0, 3.0):
        found = clock_s(buckets, backward_s=slower * (transfer_s + LATENCY), beside=True)
        assert hidden_s(SIZE, buckets, **LINE) == pytest.approx(found)
    found = clock_s(buckets, backward_s=transfer_s, beside=False)
    assert exposed_s(SIZE, buckets, **LINE) == pytest.approx(found)


def test_no_other_number_of_buckets_is_better_than_the_best():
    best = best_buckets(SIZE, **LINE)
    least = overlapped_s(SIZE, best, **LINE)
    assert least == pytest.approx(2 * math.sqrt(SIZE * LATENCY / BANDWIDTH))
    assert SIZE / best == pytest.approx(math.sqrt(SIZE * BANDWIDTH * LATENCY))
    overheads = [clock_s(n, backward_s=SIZE / n / BANDWIDTH, beside=True) for n in range(1, 100)]
    assert abs(1 + overheads.index(min(overheads)) - best) <= 1
    assert all(least <= overhead for overhead in overheads)


def test_edges():
    assert best_buckets(10.0, **LINE) == 1.0  # less than a bucket is none
    assert best_buckets(SIZE, bandwidth=BANDWIDTH, latency_s=0.0) == math.inf
    assert all(
        exposed_s(SIZE, a, **LINE) < exposed_s(SIZE, b, **LINE) for a, b in itertools.pairwise(range(1, 9))
    )
