"""Ledgers of ranks as one: the stages of a pipeline, and our own count against the dispatcher's."""

import pytest

from compare.contract.communication import Communication
from torchpar.measure.ledger import RankLedger, of_all_ranks

ALONE = [0, 0, 0]


def rank(*sizes: int, seen: int, own: int) -> RankLedger:
    """A rank with a send in each of several places."""
    rows = [
        Communication(kind="permute", axis="pp", calls=1, bytes=size, wire_bytes=size, source=f"line {place}")
        for place, size in enumerate(sizes)
    ]
    return RankLedger(rows, {"pp": seen}, {"pp": own})


def test_each_stage_has_the_rows_of_its_busiest_rank():
    ranks = [
        rank(10, 3, seen=13, own=13),
        rank(12, seen=12, own=12),
        rank(7, seen=7, own=7),
        rank(seen=0, own=0),
    ]
    found = of_all_ranks(ranks, stages=[0, 0, 1, 1], counts_own=True)
    assert [(row.stage, row.source, row.bytes) for row in found.rows] == [
        (0, "line 0", 12),
        (0, "line 1", 3),
        (1, "line 0", 7),
    ]
    assert found.is_complete


@pytest.mark.parametrize(("seen", "complete"), [(1000, True), (1016, True), (1017, False), (0, False)])
def test_what_the_dispatcher_saw_must_be_what_our_calls_are_of(seen, complete):
    """But for the padding of pieces: at most a number for each call and rank."""
    ranks = [rank(1000, seen=seen, own=1000), rank(seen=0, own=0)]
    problem = f"along pp our own calls send 1,000 bytes, and the dispatcher saw {seen:,}"
    found = of_all_ranks(ranks, stages=ALONE[:2], counts_own=True)
    assert found.problems == ([] if complete else [problem])
    # A library's are not ours to count.
    assert of_all_ranks(ranks, stages=ALONE[:2], counts_own=False).is_complete


def test_what_a_rank_could_not_count_makes_the_ledger_of_all_incomplete():
    """Of a library's collectives, too."""
    ranks = [
        rank(10, seen=10, own=0)._replace(problems=problems) for problems in [(), ("one",), ("one", "two")]
    ]
    assert of_all_ranks(ranks, stages=ALONE, counts_own=False).problems == ["one", "two"]
