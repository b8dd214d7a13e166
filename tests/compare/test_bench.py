"""A bench with engines that are made up: rounds, failures, Ctrl-C, going on."""

import pytest

from compare import api
from compare.cli import main
from compare.commands.bench.outcome import read_timings, rows_by_block
from compare.execute.launch import EngineError
from compare.judge import alone
from compare.judge.observed import Finding
from compare.judge.outcome import OUTCOME, read_outcome
from compare.judge.strategy import Strategy
from compare.spec.experiment import ExperimentError
from tests.support.made_up import bench


def test_bench_runs_each_case_in_each_round(engines, tmp_path, capsys):
    assert bench("--rounds", "3") == 0
    manual, library = "torch-manual.single", "torch-library.single"
    order = [manual, library, library, manual, manual, library]
    assert engines.started == [f"round {1 + place // 2}, {name}" for place, name in enumerate(order)]
    assert all(request.timing and not request.ladder for request in engines.requests)
    assert all(request.experiment.train.max_iters == request.timing.steps for request in engines.requests)
    result = read_timings(read_outcome(tmp_path / "b"))
    assert [len(rounds) for rounds in result.measurements.values()] == [3, 3]
    assert (result.finished_rounds, result.failures) == (3, {})
    one = result.measurements[manual][1]
    assert (one.wall_ms, one.cpu_ms) == (pytest.approx(10), pytest.approx(20))
    assert (len(one.single_ms), len(one.windows)) == (result.timing.single, result.timing.windows)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["bench.html", OUTCOME]
    printed = capsys.readouterr().out
    assert "Fewer than 5 rounds give no interval" in printed
    assert "[" not in next(line for line in printed.splitlines() if "torch-library" in line)
    (tmp_path / "b" / "bench.html").unlink()
    assert main(["report", "b"]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "b" / "bench.html").is_file()


def test_bench_retries_failed_case_once(engines, tmp_path, capsys):
    engines.failing["torch-library"] = EngineError("torch-library: <b>no</b> luck", exit_code=1)
    assert bench("--rounds", "5") == 1
    tries = [name for name in engines.started if "torch-library" in name]
    assert tries == ["round 1, torch-library.single", "round 2, torch-library.single"]
    result = read_timings(read_outcome(tmp_path / "b"))
    assert ([len(rounds) for rounds in result.measurements.values()], result.finished_rounds) == ([5], 0)
    printed = capsys.readouterr().out
    assert "torch-library.single did not finish: torch-library: <b>no</b> luck" in printed
    assert "INCOMPLETE" in printed
    page = (tmp_path / "b" / "bench.html").read_text()
    assert "&lt;b&gt;no&lt;/b&gt; luck" in page
    assert "<b>no</b>" not in page


@pytest.mark.parametrize("at", [1, 4])
def test_ctrl_c_keeps_the_finished_rounds(engines, tmp_path, capsys, at):
    engines.interrupted_at = at
    assert bench("--rounds", "3") == 130
    said = capsys.readouterr().err
    assert f"Kept: {(at - 1) // 2} of 3 rounds" in said
    assert "shardpair bench --continue b" in said
    assert sum(map(len, read_timings(read_outcome(tmp_path / "b")).measurements.values())) == at - 1
    engines.started.clear()
    engines.interrupted_at = 0
    assert main(["bench", "--continue", "b", "--quiet"]) == 0
    assert len(engines.started) == 6 - (at - 1)
    result = read_timings(read_outcome(tmp_path / "b"))
    assert result.finished_rounds == 3


def test_bench_reports_other_work_and_mixed_ways(engines, capsys):
    engines.loss["torch-library"] = 2.6
    engines.threads = iter(["one", "one", "one", "two"])  # A B, then B A
    assert bench("--rounds", "2") == 1
    said = capsys.readouterr().out
    assert "torch-library.single did not do the same work as torch-manual.single: in round 1 the loss" in said
    assert "torch-manual.single did not run in the same way in all rounds" in said


def test_bench_fails_if_strategy_was_not_done(engines, monkeypatch, capsys):
    skipped = Strategy(findings=[Finding(setting="layout.remat", asked="full", found="none")])
    monkeypatch.setattr(alone, "strategy_of", lambda record: skipped)
    assert bench("--rounds", "1") == 1
    assert "layout.remat = full was asked for; found: none" in capsys.readouterr().err


def test_bench_fails_without_all_windows(engines, capsys):
    engines.windows = 1
    assert bench("--rounds", "1") == 1
    assert "it timed 1 of 3 windows" in capsys.readouterr().err


def test_a_bench_from_python(engines, capsys):
    asked = {"engines": ["torch-manual", "torch-library"], "rounds": 5, "run_dir": "b", "quiet": True}
    race = api.study("bench", "tiny.toml", **asked)
    ((manual, library),) = rows_by_block(read_timings(race.outcome)).values()
    assert manual.wall_ratio is None  # the baseline
    assert library.wall_ratio is not None
    assert library.wall_ratio.low <= 1.0 <= library.wall_ratio.high
    assert "Wall time divided by the wall time of torch-manual, 5 rounds" in repr(race)
    assert api.read("b").sentence() == race.sentence()
    assert capsys.readouterr().out == ""
    with pytest.raises(ExperimentError, match="rounds"):
        api.study("bench", "tiny.toml", rounds=0)
