"""A bench with engines that are made up: rounds, failures, Ctrl-C, going on."""

import pytest
from msgspec.structs import replace

from compare import api
from compare.cli import main
from compare.commands.bench.outcome import blocks, timed
from compare.commands.bench.timed_study import misstated
from compare.execute.launch import EngineError
from compare.judge import ladder
from compare.judge.outcome import OUTCOME, read_outcome
from compare.judge.strategy import Finding, Strategy
from compare.spec.experiment import ExperimentError
from tests.support.made_up import bench
from tests.support.records import make_steps


def test_every_case_is_a_process_of_its_own_in_every_round(timed_engines, tmp_path, capsys):
    assert bench("--rounds", "3") == 0
    manual, library = "torch-manual.single", "torch-library.single"
    order = [manual, library, library, manual, manual, library]
    assert timed_engines.started == [f"round {1 + place // 2}, {name}" for place, name in enumerate(order)]
    assert all(request.timing and not request.ladder for request in timed_engines.requests)
    assert all(
        request.experiment.train.max_iters == request.timing.steps for request in timed_engines.requests
    )
    result = timed(read_outcome(tmp_path / "b"))
    assert [len(rounds) for rounds in result.measurements.values()] == [3, 3]
    assert (result.finished_rounds, result.failures) == (3, {})
    one = result.measurements[manual][1]
    assert (one.wall_ms, one.cpu_ms) == (pytest.approx(10), pytest.approx(20))
    assert (len(one.single_ms), len(one.windows)) == (result.timing.single, result.timing.windows)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["bench.html", OUTCOME, "stdlib.txt"]
    printed = capsys.readouterr().out
    assert "Fewer than 5 rounds: no interval can be told" in printed
    assert "[" not in next(line for line in printed.splitlines() if "torch-library" in line)
    (tmp_path / "b" / "bench.html").unlink()
    assert main(["report", "b"]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "b" / "bench.html").is_file()


def test_a_case_that_fails_is_named_tried_once_more_and_ends_no_other(timed_engines, tmp_path, capsys):
    timed_engines.failing["torch-library"] = EngineError("torch-library: <b>no</b> luck", exit_code=1)
    assert bench("--rounds", "5") == 1
    tries = [name for name in timed_engines.started if "torch-library" in name]
    assert tries == ["round 1, torch-library.single", "round 2, torch-library.single"]
    result = timed(read_outcome(tmp_path / "b"))
    assert ([len(rounds) for rounds in result.measurements.values()], result.finished_rounds) == ([5], 0)
    printed = capsys.readouterr().out
    assert "torch-library.single did not finish: torch-library: <b>no</b> luck" in printed
    assert "INCOMPLETE" in printed
    page = (tmp_path / "b" / "bench.html").read_text()
    assert "&lt;b&gt;no&lt;/b&gt; luck" in page
    assert "<b>no</b>" not in page


@pytest.mark.parametrize("at", [1, 4])
def test_ctrl_c_keeps_the_finished_rounds(timed_engines, tmp_path, capsys, at):
    timed_engines.interrupted_at = at
    assert bench("--rounds", "3") == 130
    said = capsys.readouterr().err
    assert f"Kept: {(at - 1) // 2} of 3 rounds" in said
    assert "shardpair bench --continue b" in said
    assert sum(map(len, timed(read_outcome(tmp_path / "b")).measurements.values())) == at - 1
    timed_engines.started.clear()
    timed_engines.interrupted_at = 0
    assert main(["bench", "--continue", "b", "--quiet"]) == 0
    assert len(timed_engines.started) == 6 - (at - 1)
    result = timed(read_outcome(tmp_path / "b"))
    assert (result.finished_rounds, len(result.circumstances.busy_cores)) == (3, 3)


def test_figures_are_held_against_what_the_machine_can_do(timed_engines, tmp_path, capsys):
    assert main(["bench", "tiny.toml", "--engines", "torch-manual", "jax-manual", "--rounds", "3"]) == 0
    printed = capsys.readouterr().out
    assert "fastest matrix product on all cores: torchpar float64 1 GFLOP/s." in printed
    assert "left out: ceiling of jaxpar float64: no matmul ceiling: it is shy" in printed
    (folder,) = (tmp_path / "runs").iterdir()
    manual, jax = next(iter(blocks(timed(read_outcome(folder))).values()))
    assert manual.of_ceiling == manual.flops_per_s / 1e9
    assert (jax.of_ceiling, jax.mfu) == (None, None)


def test_figures_of_another_work_or_way_are_noticed(timed_engines, capsys):
    timed_engines.loss["torch-library"] = 2.6
    timed_engines.threads = iter(["one", "one", "one", "two"])  # A B, then B A
    assert bench("--rounds", "2") == 1
    said = capsys.readouterr().out
    assert "torch-library.single did not do the same work as torch-manual.single: in round 1 the loss" in said
    assert "torch-manual.single did not run in the same way in all rounds" in said


def test_a_clock_that_says_less_than_passed_is_noticed(tiny):
    (first, *_), others = make_steps(tiny), range(1, 31)

    def read_at(*times: float, ms: float, watched: bool = False) -> list[str]:
        steps = [replace(first, step=n, step_time_ms=ms, instrumented=watched and n == 1) for n in others]
        return misstated({0.0: [first], **dict.fromkeys(times, steps)})

    assert read_at(3.1, ms=100) == []
    assert read_at(3.1, ms=10) == ["it says that steps took 0.30 s that took 3.10 s by the disk's clock"]
    assert len(read_at(3.1, 6.2, ms=50)) == 1
    assert read_at(3.1, ms=10, watched=True) == []
    assert read_at(0.3, ms=3) == []  # a busy machine kept a short window waiting: 0.23 s were seen
    assert misstated({0.0: [first]}) == []


def test_a_strategy_that_was_not_done_is_a_failure(timed_engines, monkeypatch, capsys):
    skipped = Strategy(findings=[Finding(setting="layout.remat", asked="full", found="none")])
    monkeypatch.setattr(ladder, "strategy_of", lambda record: skipped)
    assert bench("--rounds", "1") == 1
    assert "layout.remat = full was asked for, and none was done" in capsys.readouterr().err


def test_a_record_that_is_not_what_was_asked_for_is_a_failure(timed_engines, capsys):
    timed_engines.windows = 1
    assert bench("--rounds", "1") == 1
    assert "it timed 1 of 3 windows" in capsys.readouterr().err


def test_a_bench_from_python(timed_engines, capsys):
    asked = {"engines": ["torch-manual", "torch-library"], "rounds": 5, "run_dir": "b", "quiet": True}
    race = api.study("bench", "tiny.toml", **asked)
    ((manual, library),) = blocks(timed(race.outcome)).values()
    assert manual.wall_ratio is None  # the baseline
    assert library.wall_ratio is not None
    assert library.wall_ratio.low <= 1.0 <= library.wall_ratio.high
    assert "Wall time over that of torch-manual, 5 rounds" in repr(race)
    assert api.read("b").sentence() == race.sentence()
    assert capsys.readouterr().out == ""
    with pytest.raises(ExperimentError, match="rounds"):
        api.study("bench", "tiny.toml", rounds=0)
