"""`shardpair collectives`: fits, refusals, what memory leaves out, how it is shown; and both sides run."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from benches import HERE
from records import outcome_of

from compare import cli
from compare.cli import main
from compare.contract.collective_bench import (
    IMPLEMENTATIONS,
    KINDS,
    CollectiveCase,
    CollectiveRow,
    Kind,
    append_row,
    make_row,
)
from compare.execute import launch
from compare.execute.launch import EngineError
from compare.host.tensors import RecordError
from compare.judge.collective_fit import fit_line, fits_of
from compare.judge.outcome import OUTCOME, Outcome, read_outcome, save
from compare.show import terminal
from compare.show.figures import save_figures
from compare.show.page import write_page
from compare.spec.experiment import Experiment
from compare.studies import collective_runs as study
from compare.studies.collective_runs import CollectiveBench, Order, requests_of, sizes_between
from compare.studies.collectives import Collectives
from compare.terminal import PlainConsole

SIZES = sizes_between(1024, 2**20, 4)
LATENCY_S, BANDWIDTH = 50e-6, 2e9


def row_of(name: str, kind: Kind, size: int, *, ranks: int = 4, wrong: int = 0, seconds: float = 0.0):
    """A row whose time is on the line of `LATENCY_S` and `BANDWIDTH`, unless it is given."""
    case = CollectiveCase(kind, size)
    seconds = seconds or LATENCY_S + size / BANDWIDTH
    return make_row(name, case, ranks=ranks, seconds=seconds, iterations=5, wrong=wrong)


def bench_of(rows: list[CollectiveRow], **given) -> CollectiveBench:
    return CollectiveBench(**{"requests": {}, "rows": rows, "fits": fits_of(rows)} | given)


def outcome_with(bench: CollectiveBench, *, busy: float = 0.0, **given) -> Outcome:
    circumstances = msgspec.structs.replace(HERE, busy_cores=[busy])
    fields = {
        "study": "collectives",
        "circumstances": circumstances,
        "more": {"bench": msgspec.to_builtins(bench)},
    }
    return outcome_of(Experiment(), **fields | given)


def all_rows() -> list[CollectiveRow]:
    names = [name for name, one in IMPLEMENTATIONS.items() if "cpu" in one.platforms]
    return [
        row_of(name, kind, size, ranks=ranks)
        for ranks in (2, 4)
        for kind in KINDS
        for size in SIZES
        for name in names
    ]


def test_the_fit_finds_latency_and_bandwidth():
    times = [LATENCY_S + size / BANDWIDTH for size in SIZES]
    latency, per_byte = fit_line(SIZES, times)
    assert latency == pytest.approx(LATENCY_S, rel=1e-9)
    assert 1 / per_byte == pytest.approx(BANDWIDTH, rel=1e-9)


def test_the_fit_holds_against_noise_at_every_size():
    random = np.random.default_rng(0)
    sizes = np.repeat(SIZES, 40)
    times = (LATENCY_S + sizes / BANDWIDTH) * random.lognormal(0.0, 0.1, len(sizes))
    latency, per_byte = fit_line(sizes, times)
    assert latency == pytest.approx(LATENCY_S, rel=0.05)
    assert 1 / per_byte == pytest.approx(BANDWIDTH, rel=0.05)


def test_neither_latency_nor_bandwidth_is_ever_negative():
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
    assert flat.bandwidth_gb_s is msgspec.UNSET


def test_wrong_elements_and_failures_are_the_outcome():
    good = bench_of(all_rows())
    assert good.passed
    wrong = bench_of([*all_rows(), row_of("ours", "permute", 1024, wrong=3)])
    assert not wrong.passed
    assert wrong.sentence() == "wrong results: 3 elements in ours permute"
    failed = bench_of(all_rows(), failures={"torchpar-4": "torchpar-4: rank 1 was killed"})
    assert not failed.passed
    assert failed.sentence() == "did not finish: torchpar-4: rank 1 was killed"
    assert not bench_of([]).passed


def order(**given) -> Order:
    fields = {"kinds": KINDS, "implementations": ("gloo", "ours", "xla"), "sizes": SIZES, "ranks": (2, 4)}
    return Order(**fields | given)


def test_a_request_for_each_side_and_number_of_ranks():
    requests, left_out = requests_of(order())
    assert list(requests) == ["jaxpar-2", "torchpar-2", "jaxpar-4", "torchpar-4"]
    assert left_out == {}
    assert requests["torchpar-4"].implementations == ("gloo", "ours")
    assert len(requests["jaxpar-2"].cases) == len(KINDS) * len(SIZES)


def test_what_memory_cannot_hold_is_left_out_by_name(monkeypatch):
    monkeypatch.setattr(study, "free_memory_bytes", lambda: 4 * 4 * SIZES[-1] - 1)
    requests, left_out = requests_of(order(kinds=("all_reduce",)))
    assert [len(request.cases) for request in requests.values()] == [6, 6, 5, 5]
    ((name, why),) = left_out.items()
    assert name == "all_reduce on 4 ranks from 1,048,576 bytes on"
    assert why.startswith("it needs 16.8 MB")
    monkeypatch.setattr(study, "free_memory_bytes", lambda: 0)
    assert main(["collectives"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_size", "1T"], "--max_size 1T: give bytes"),
        (["--min_size", "2M", "--max_size", "1M"], "the largest is not below the smallest"),
        (["--min_size", "1"], "sizes begin with 4 bytes"),
        (["--factor", "1"], "--factor 1 must be at least 2"),
        (["--ranks", "1"], "--ranks 1: give between 2 and"),
        (["--ranks", "2", "2"], "give each number once"),
        (["--row_s", "0"], "--row_s 0.0 must be more than 0"),
        (["--implementations", "nccl"], "no such way on platform cpu"),
        (["--kinds", "permute", "--fault", "all_reduce"], "it is not among --kinds"),
        (["--picture", "a.txt"], "end it in one of"),
        (["--torch_python", "/nowhere"], "no such program"),
        (["--hosts", "2", "--ranks", "3"], "--ranks 3: 2 hosts do not divide them"),
        (["--launcher", "torchrun"], "--launcher torchrun and --hostfile FILE: give both"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(capsys, arguments, message):
    assert main(["collectives", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_gpus_that_are_not_there(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["collectives", "--platform", "gpu"]) == 3
    monkeypatch.setattr(launch, "visible_gpus", lambda: 1)
    assert main(["collectives", "--platform", "gpu", "--ranks", "2"]) == 2
    assert "1 GPU is visible" in " ".join(capsys.readouterr().err.split())


def test_sizes_are_powers_as_in_nccl_tests():
    assert sizes_between(1024, 70_000, 4) == (1024, 4096, 16384, 65536)
    asked = cli.parse(["collectives", "--min_size", "8", "--max_size", "1k", "--factor", "2"])[0].order()
    assert asked.sizes == (8, 16, 32, 64, 128, 256, 512, 1024)
    assert asked.ranks == (2, 4, 6)


def test_bench_collectives_is_the_same_command(monkeypatch):
    monkeypatch.setattr(Collectives, "__call__", lambda self, default: len(self.kinds) + 40)
    assert main(["bench", "collectives", "--kinds", "permute", "broadcast"]) == 42


def test_the_command_that_makes_it_again_asks_for_the_same():
    asked, _ = cli.parse(["collectives", "--ranks", "4", "--max_size", "64K", "--kinds", "permute"])
    again = asked.command_line(asked.order()).split()[1:]
    assert cli.parse(again)[0].order() == asked.order()


def test_tables_have_the_columns_of_nccl_tests_and_fit_into_80_characters(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "results_console", lambda: PlainConsole(width=80))
    rows = [row_of(name, "all_reduce", size) for size in (*SIZES, 2**30) for name in ("ours", "gloo")]
    terminal.print_findings(Collectives.findings(outcome_with(bench_of(rows)), Path()), as_json=False)
    printed = capsys.readouterr().out
    assert "all_reduce on 4 ranks" in printed
    for word in ("size (B)", "count", "type", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong"):
        assert all(part in printed for part in word.split()), word
    lines = [line.split() for line in printed.splitlines()]
    assert ["4,096", "1,024", "float32", "gloo", "52.0", "0.079", "0.118", "0"] in lines
    assert ["all_reduce", "4", "ours", "50.0", "2.000", "0%"] in lines
    assert "\u2026" not in printed  # nothing is cut


def rows_in(folder: Path) -> CollectiveBench:
    return study.bench_of(read_outcome(folder))


def page_of(folder, outcome: Outcome) -> str:
    return write_page(folder / "collectives.html", Collectives.findings(outcome, Path())).read_text()


def test_the_page_stands_alone(tmp_path):
    bench = bench_of([*all_rows(), row_of("ours", "permute", 2**22, wrong=3)])
    outcome = outcome_with(bench, left_out={"a <b>": "too large"})
    page = page_of(tmp_path, outcome)
    assert page.count("<svg") == 2 * len(KINDS)
    assert "a &lt;b&gt;" in page
    assert 'class="fail">3' in page
    assert "What spoils these figures" not in page
    busy = page_of(tmp_path, outcome_with(bench_of(all_rows()), busy=99.0))
    assert "other processes used 99.0 cores" in busy
    assert "http://" not in page.replace("http://www.w3.org", "")
    found = Collectives.findings(outcome, Path())
    save_figures(tmp_path / "a.png", found.figures)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_is_shown_again_as_it_was(tmp_path, capsys):
    rows = [row_of("ours", "all_reduce", size) for size in SIZES]
    flat = fits_of([msgspec.structs.replace(row, time_us=50.0) for row in rows])
    bench = msgspec.structs.replace(bench_of(rows), fits=flat)
    save(outcome_with(bench), tmp_path)
    assert rows_in(tmp_path) == bench  # of a time that does not grow, too
    assert math.isinf(rows_in(tmp_path).fits[0].bytes_per_s)
    assert main(["report", str(tmp_path), "--picture", str(tmp_path / "a.png")]) == 0
    assert "all_reduce on 4 ranks" in capsys.readouterr().out
    assert (tmp_path / "collectives.html").is_file()
    assert (tmp_path / "a.png").is_file()


def test_a_folder_without_a_benchmark_is_named(tmp_path):
    with pytest.raises(RecordError, match=OUTCOME):
        rows_in(tmp_path)


def test_both_sides_compute_every_collective_and_a_planted_error_is_seen(shardpair):
    done = shardpair(
        *("collectives", "--ranks", "4", "--max_size", "4K", "--row_s", "0.001", "--anyway"),
        *("--fault", "all_reduce", "--run_dir", "out", "--json"),
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    rows = found["rows"]
    assert len(rows) == 3 * len(KINDS) * 2
    assert {row["implementation"] for row in rows} == {"gloo", "ours", "xla"}
    for row in rows:
        assert row["wrong"] == (1 if row["kind"] == "all_reduce" else 0), row
        assert row["time_us"] > 0
    assert "did not finish" not in done.stderr
    assert found["result"]["more"]["bench"]["failures"] == {}
    assert rows_in(shardpair.folder / "out").wrong == 6
    assert (shardpair.folder / "out" / "collectives.html").is_file()


def test_what_fails_is_named_and_what_was_interrupted_is_shown(tmp_path, monkeypatch, capsys):
    """The first side leaves a row and fails, the second leaves one and is interrupted."""

    def run_side(side, folder, *, name, **_):
        append_row(folder, row_of("xla" if "jax" in name else "gloo", "permute", 1024, ranks=2))
        if "jax" in name:
            raise EngineError(f"{name}: out of memory", exit_code=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run_side", run_side)
    arguments = ["--ranks", "2", "--kinds", "permute", "--max_size", "1K", "--anyway"]
    assert main(["collectives", *arguments, "--run_dir", str(tmp_path / "out")]) == 130
    captured = capsys.readouterr()
    assert "2 finished rows are kept in" in captured.err
    assert "did not finish: jaxpar-2: out of memory; torchpar-2: interrupted" in captured.out
    assert [row.implementation for row in rows_in(tmp_path / "out").rows] == [
        "xla",
        "gloo",
    ]
