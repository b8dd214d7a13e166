"""The page of slow links, second part: fits beside what the link allows, overheads beside closed forms."""

import pytest
from link_collectives import BUCKETS, COLLECTIVES, AtCap, LinkCollectives, fit_table, overhead_table
from link_hosts import NAMES, RATES_GBIT

from compare import cli
from compare.judge.bucket_overheads import Point
from compare.judge.circumstances import Circumstances
from compare.judge.collective_fit import Fit
from compare.judge.statistics import estimate


def at_cap(gbit: float, bytes_per_s: float, *, points: list[Point]) -> AtCap:
    fits = [
        Fit(implementation="ours", kind=kind, ranks=2, latency_us=50, misfit=0.1, bandwidth_gb_s=0.1)
        for kind in ("all_reduce", "all_gather")
    ]
    return AtCap(gbit=gbit, bytes_per_s=bytes_per_s, fits=fits, points=points)


POINT = Point(
    name="flat",
    gradient_sync="flat",
    bucket_mb=None,
    buckets=1,
    wall_ms=60,
    overhead_ms=estimate([10.0, 11.0, 12.0, 11.0, 11.0]),
    overlapped_ms=None,
    exposed_ms=9.5,
)
FOUND = LinkCollectives(
    circumstances=Circumstances(), caps=[at_cap(0, 4e9, points=[]), at_cap(1, 120e6, points=[POINT])]
)


def test_fits_stand_below_what_the_link_allows():
    """Of two ranks each sends a whole tensor of an all-reduce, and half of a gathered one."""
    rows = {row.head.text: [cell.text for cell in row.cells] for row in fit_table(FOUND).rows}
    assert rows == {
        "all_reduce: the link allows": ["4.000", "0.120"],
        "all_reduce, ours": ["50, 0.100", "50, 0.100"],
        "all_gather: the link allows": ["8.000", "0.240"],
        "all_gather, ours": ["50, 0.100", "50, 0.100"],
    }


def test_overheads_stand_beside_both_closed_forms():
    table = overhead_table(FOUND)
    assert table.columns == ["ms at 1 gbit/s (overlapped, exposed by the closed form)"]
    (row,) = table.rows
    assert row.head.text == "flat: 1 messages"
    assert row.cells[0].text == "11.0 [10.0, 12.0] (-, 9.5)"


@pytest.mark.parametrize("words", [f"collectives {COLLECTIVES}", f"buckets {BUCKETS}"])
def test_what_is_run_is_a_command(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, _ = cli.parse(words.split())
    assert command.launcher == "local"
    assert len(NAMES) == 2
    assert RATES_GBIT[0] == 0
