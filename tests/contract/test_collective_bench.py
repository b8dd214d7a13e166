"""The benchmark of collectives without collectives: bandwidths, expected results, sizes, iterations."""

import itertools

import numpy as np
import pytest

from compare.contract.communication import ring_wire_bytes
from compare.side import collective_bench
from compare.side.collective_bench import (
    FEWEST,
    IN_PIECES,
    KINDS,
    TRIAL,
    WARMUP,
    CollectiveCase,
    elements,
    expected,
    make_row,
    measure,
    sent,
)

FACTORS_OF_FOUR = {
    "all_reduce": 1.5,
    "all_gather": 0.75,
    "reduce_scatter": 0.75,
    "all_to_all": 0.75,
    "broadcast": 1.0,
    "permute": 1.0,
}
"""busbw / algbw on four ranks, counted by hand."""


@pytest.mark.parametrize("kind", KINDS)
def test_bus_bandwidth_on_four_ranks(kind):
    row = make_row("gloo", CollectiveCase(kind, 4096), ranks=4, seconds=2e-6, wrong=0)
    assert (row.size, row.time_us) == (4096, 2.0)
    assert row.algbw_gb_s == pytest.approx(4096 / 2e-6 / 1e9)
    assert row.busbw_gb_s == pytest.approx(FACTORS_OF_FOUR[kind] * row.algbw_gb_s)


def test_one_rank_sends_nothing():
    assert ring_wire_bytes("all_reduce", 1000, 1) == 0


def by_definition(kind: str, given: list[np.ndarray], rank: int) -> np.ndarray:
    """The result on a rank, from the inputs of all ranks."""
    pieces = [np.split(one, len(given)) for one in given] if kind in ("reduce_scatter", "all_to_all") else []
    match kind:
        case "all_reduce":
            return np.sum(given, axis=0)
        case "all_gather":
            return np.concatenate(given)
        case "reduce_scatter":
            return np.sum([own[rank] for own in pieces], axis=0)
        case "all_to_all":
            return np.concatenate([own[rank] for own in pieces])
        case "broadcast":
            return given[0]
    return given[rank - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_expected_results_by_definition(kind):
    for ranks, count in itertools.product((2, 3, 6), (4, 40, 400)):
        given = [sent(kind, rank, ranks=ranks, count=count).astype(np.float64) for rank in range(ranks)]
        for rank in range(ranks):
            wanted = by_definition(kind, given, rank)
            found = expected(kind, rank, ranks=ranks, count=count)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, wanted)


def test_numbers_differ_and_sums_are_exact():
    many = 64
    given = [tuple(sent("all_gather", rank, ranks=many, count=40)) for rank in range(many)]
    assert len(set(given)) == many
    assert many * max(map(max, given)) < 2**24  # smaller integers are exact in float32


@pytest.mark.parametrize("kind", KINDS)
def test_size_is_a_total_of_equal_pieces(kind):
    count = elements(kind, 1024, 6)
    assert count == (40 if kind in IN_PIECES else 256)  # nccl-tests: 256 / (4 x 6) x 4
    row = make_row("gloo", CollectiveCase(kind, 1024), ranks=6, seconds=1.0, wrong=0)
    assert row.size == (960 if kind in IN_PIECES else 1024)
    assert elements(kind, 4, 6) > 0


class Clock:
    """A clock that only calls advance."""

    def __init__(self, call_s: float):
        self.now, self.calls, self._call_s = 0.0, 0, call_s

    def call(self) -> None:
        self.now, self.calls = self.now + self._call_s, self.calls + 1


@pytest.mark.parametrize(("call_s", "slower", "iterations"), [(0.01, 1, 20), (1.0, 1, FEWEST), (0.01, 2, 10)])
def test_measure_takes_row_s_or_five_calls(call_s, slower, iterations, monkeypatch):
    clock = Clock(call_s)
    monkeypatch.setattr(collective_bench.time, "perf_counter", lambda: clock.now)
    seconds = measure(clock.call, wait=lambda: None, slowest=lambda value: slower * value, row_s=0.2)
    assert seconds == pytest.approx(slower * call_s)
    assert clock.calls == WARMUP + TRIAL + iterations
