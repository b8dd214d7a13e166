"""The page of slow links: what its formulas give, and that its cases are layouts of the engines they name."""

import pytest
from link_hosts import RATES_GBIT
from links import CASES, AtRate, Link, LinkRow, Links, experiment_of
from links_tables import choices, errors, exposed_ms, hidden_ms, step_table

from compare.judge.circumstances import Circumstances, MachineFacts
from compare.spec.engines.registry import ENGINES

SLOW = Link(gbit=1, bytes_per_s=100e6, latency_s=1e-4)
FREE = Link(gbit=0, bytes_per_s=4e9, latency_s=1e-5)
HERE = Circumstances(
    created_utc="2026-01-01T00:00:00+00:00",
    machine=MachineFacts(system="Linux", cpu_model="a CPU", cores=2, memory_bytes=2**30),
)


def row(case: str, crossing: int, *ms: float) -> LinkRow:
    """A case that took so long without a cap and with one."""
    rates = [
        AtRate(gbit=gbit, step_ms=time, low_ms=time, high_ms=time, steps=6)
        for gbit, time in zip((0, 1), ms, strict=True)
    ]
    return LinkRow(
        case=case,
        engine="torch-manual",
        devices=4,
        crossing_bytes=crossing,
        sent_bytes=crossing * 1.05,
        rates=rates,
    )


def test_two_bounds_of_a_step():
    one = row("tp 4", 4_000_000, 30.0, 50.0)  # 2 MB each way at 100 MB/s: 20 ms
    assert exposed_ms(one, SLOW, FREE) == pytest.approx(49.5)  # half a millisecond without a cap
    assert hidden_ms(one, SLOW) == pytest.approx(30)
    assert hidden_ms(row("tp 4", 8_000_000, 30.0, 50.0), SLOW) == pytest.approx(40)


def test_the_page_says_what_is_the_fastest_and_what_the_formula_names():
    rows = [row("tp 4", 4_000_000, 20.0, 80.0), row("hsdp 2 x 2", 1_000_000, 30.0, 90.0)]
    found = Links(circumstances=HERE, links=[FREE, SLOW], rows=rows)
    assert choices(found) == "- torch-manual at 1 gbit/s: tp 4 is the fastest, the formula names hsdp 2 x 2"
    assert "the furthest is hsdp 2 x 2, torch-manual (+158%); 0 of 2 lie between" in errors(found)
    assert [cell.text for cell in step_table(found).rows[0].cells] == ["2.00", "2.10", "20", "80 (20 to 40)"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_layout_of_its_engines(case):
    experiment = experiment_of(case)
    assert experiment.layout.devices % 2 == 0
    for engine in case.engines:
        ENGINES[engine].require_experiment(experiment, platform="cpu")


def test_caps_go_down_from_none():
    free, *caps = RATES_GBIT
    assert free == 0
    assert caps == sorted(caps, reverse=True)
