"""`shardpair collectives`: fits, refusals, how it is shown; and both sides run, on one host and on two."""

import json
from pathlib import Path

import msgspec
import pytest
from records import MADE, outcome_of

from compare import cli
from compare.commands.collectives import Collectives, implementations_on, sizes_between
from compare.commands.collectives.fit import fit_line, fits_of
from compare.contract.request import Request
from compare.execute import launchers
from compare.judge.outcome import Case, Outcome
from compare.show.page import write_page
from compare.side.collective_bench import (
    KINDS,
    CollectiveCase,
    CollectiveRow,
    CollectiveTimes,
    Kind,
    make_row,
)
from compare.spec.experiment import Experiment

SIZES = sizes_between(1024, 2**20)
LATENCY_S, BANDWIDTH = 50e-6, 2e9


def row_of(name: str, kind: Kind, size: int, *, ranks: int = 4, wrong: int = 0, seconds: float = 0.0):
    """A row whose time is on the line of `LATENCY_S` and `BANDWIDTH`, unless it is given."""
    case = CollectiveCase(kind, size)
    seconds = seconds or LATENCY_S + size / BANDWIDTH
    return make_row(name, case, ranks=ranks, seconds=seconds, wrong=wrong)


def times_of(rows: list[CollectiveRow]) -> CollectiveTimes:
    return CollectiveTimes(rows=rows, device_kind="cpu", versions={}, threads="1 per rank", hosts=["box"])


def outcome_with(rows: list[CollectiveRow], *, busy: float = 0.0) -> Outcome:
    circumstances = msgspec.structs.replace(MADE, busy_cores=[busy])
    case = Case(request=Request(engine="torch-manual", experiment=Experiment()))
    kept = {"torchpar-4": {1: msgspec.to_builtins(times_of(rows))}}
    fields = {"study": "collectives", "circumstances": circumstances, "kept": kept}
    return outcome_of(Experiment(), **fields, cases={"torchpar-4": case})


def all_rows() -> list[CollectiveRow]:
    return [
        row_of(name, kind, size, ranks=ranks)
        for ranks in (2, 4)
        for kind in KINDS
        for size in SIZES
        for name in implementations_on("cpu")
    ]


def test_the_fit_finds_latency_and_bandwidth():
    times = [LATENCY_S + size / BANDWIDTH for size in SIZES]
    latency, per_byte = fit_line(SIZES, times)
    assert latency == pytest.approx(LATENCY_S, rel=1e-9)
    assert 1 / per_byte == pytest.approx(BANDWIDTH, rel=1e-9)
    # Neither is ever negative.
    assert fit_line(SIZES, [1e-3] * len(SIZES)) == (pytest.approx(1e-3), 0.0)
    falling = [1e-3 / (1 + place) for place in range(len(SIZES))]
    assert fit_line(SIZES, falling)[1] == 0.0
    latency, per_byte = fit_line(SIZES, [size / BANDWIDTH for size in SIZES])
    assert (latency, 1 / per_byte) == (pytest.approx(0.0, abs=1e-12), pytest.approx(BANDWIDTH))


def test_a_fit_for_each_way_collective_and_number_of_ranks():
    fits = fits_of(all_rows())
    assert len(fits) == 3 * len(KINDS) * 2
    reduced = next(fit for fit in fits if fit.kind == "all_reduce")
    assert reduced.latency_us == pytest.approx(50)
    assert reduced.bandwidth_gb_s == pytest.approx(2)
    assert reduced.misfit == pytest.approx(0, abs=1e-9)
    assert fits_of([row for row in all_rows() if row.size < 5000]) == []  # two sizes: any line fits
    (flat,) = fits_of([row_of("gloo", "permute", size, seconds=1e-3) for size in SIZES])
    assert flat.bandwidth_gb_s is None
    assert flat.bandwidth_gb_s is None


def test_a_process_for_each_side_and_number_of_ranks():
    asked, _ = cli.parse(["collectives", "--ranks", "2", "4", "--implementations", "gloo", "xla"])
    planned = asked.planned()
    assert list(planned.cases) == ["jaxpar-2", "torchpar-2", "jaxpar-4", "torchpar-4"]
    assert [case.experiment.layout.devices for case in planned.cases.values()] == [2, 2, 4, 4]
    only, _ = cli.parse(["collectives", "--implementations", "xla"])
    assert list(only.planned().cases) == ["jaxpar-2", "jaxpar-4", "jaxpar-6"]
    assert sizes_between(1024, 70_000) == [1024, 4096, 16384, 65536]


def test_the_page_stands_alone_and_wrong_elements_are_no_pass(tmp_path):
    rows = [*all_rows(), row_of("ours", "permute", 2**22, wrong=3)]
    found = Collectives.findings(outcome_with(rows), Path())
    assert not found.passed
    assert found.sentence == "wrong results in ours permute"
    assert Collectives.findings(outcome_with(all_rows()), Path()).passed
    page = write_page(tmp_path / "collectives.html", found).read_text()
    assert 'class="fail">3' in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    busy = Collectives.findings(outcome_with(all_rows(), busy=99.0), Path())
    assert "other processes used 99.0 cores" in busy.warnings[0]


def test_both_sides_compute_every_collective_on_two_hosts(shardpair):
    """Two hosts on the loopback, two ranks or devices on each."""
    done = shardpair(
        *("collectives", "--hosts", "2", "--ranks", "4", "--max_size", "1K", "--anyway"),
        *("--run_dir", "out", "--json"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["rows"]) == 3 * len(KINDS)
    assert {row["implementation"] for row in found["rows"]} == {"gloo", "ours", "xla"}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in found["rows"])
    for rounds in found["result"]["kept"].values():
        first, second = rounds["1"]["hosts"][0], rounds["1"]["hosts"][-1]
        assert rounds["1"]["hosts"] == [first, first, second, second]
        assert second == f"{first} (2)"
    assert "all_reduce on 4 ranks over 2 hosts" in (shardpair.folder / "out/collectives.html").read_text()


def test_ranks_are_those_that_hosts_divide_and_have_slots_for(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers.socket, "gethostname", lambda: "head")
    (tmp_path / "hostfile").write_text("head slots=2\nother slots=2\n")
    asked, _ = cli.parse(["collectives", "--hosts", "4"])
    assert list(asked.cases(Experiment())[0]) == ["jaxpar-4", "torchpar-4"]
    slots = ["--launcher", "torchrun", "--hostfile", str(tmp_path / "hostfile")]
    asked, _ = cli.parse(["collectives", *slots])
    assert list(asked.cases(Experiment())[0]) == ["jaxpar-2", "torchpar-2", "jaxpar-4", "torchpar-4"]
