"""A bench with engines that are made up: rounds, failures, Ctrl-C, a busy machine, going on."""

import json
import subprocess
import sys
import time

import msgspec
import pytest
from benches import TIMING
from records import make_record

from compare import api
from compare.cli import main
from compare.contract.ceiling import Ceiling
from compare.contract.experiment import ExperimentError, to_toml
from compare.contract.tensors import RecordError
from compare.contract.timing import Window
from compare.execute import load
from compare.execute.launch import EngineError, EnvironmentMissing
from compare.judge.bench import BENCH, read_bench
from compare.judge.bench_rows import blocks
from compare.studies import bench as study
from compare.studies import bench_process
from compare.studies.bench import continue_bench, plan_bench, run_bench
from compare.studies.bench_cases import Choice
from compare.studies.cases import Settings

ARGUMENTS = ("--engines", "torch-manual", "torch-library", "--run_dir", "b", "--quiet")


class Engines:
    """Stands in for `launch`: leaves a record of a run that took no time, fails, or is interrupted."""

    def __init__(self):
        self.launched: list[str] = []
        self.requests = []
        self.failing: tuple[str, ...] = ()
        self.interrupted_at = 0
        self.loss = {}
        self.windows = None
        self.ceilings = [1e8, 1e9, 1e7]
        """FLOP/s, round by round: the machine was somebody else's in the first and in the third."""

    def ceiling(self, side, platform, dtype, python):
        if side == "jaxpar":
            raise EnvironmentMissing("no matmul ceiling: it is shy")
        fast = self.ceilings.pop(0) if self.ceilings else 1e8
        return Ceiling(dtype=dtype, flops_per_s=fast, threads=2, size=512)

    def __call__(self, request, folder, *, pythons, on_step):
        self.launched.append(folder.name)
        self.requests.append(request)
        if len(self.launched) == self.interrupted_at:
            folder.mkdir()
            raise KeyboardInterrupt
        if request.engine in self.failing:
            folder.mkdir()
            raise EngineError(f"{request.engine}: <b>no</b> luck", exit_code=1)
        record = make_record(folder, request.experiment, engine=request.engine, tensors={}, ladder=False)
        for step in record.steps:
            on_step(step)
        timing = request.timing
        one = Window(steps=timing.window, wall_s=0.01 * timing.window, cpu_s=0.02 * timing.window)
        manifest = msgspec.structs.replace(
            record.manifest,
            corpus_sha256=request.corpus_sha256,
            windows=[one] * (timing.windows if self.windows is None else self.windows),
        )
        last = msgspec.structs.replace(record.steps[-1], loss=self.loss.get(request.engine, 2.5))
        steps = [*record.steps[:-1], last]
        return msgspec.structs.replace(record, manifest=manifest, request=request, steps=steps)


@pytest.fixture
def engines(tmp_path, monkeypatch, tiny) -> Engines:
    made_up = Engines()
    monkeypatch.setattr(bench_process, "launch", made_up)
    monkeypatch.setattr(study, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(load.LoadBeside, "cores", lambda self: 0.0)
    monkeypatch.setattr(bench_process, "measure_ceiling", made_up.ceiling)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny))
    return made_up


def bench(*arguments: str) -> int:
    return main(["bench", "tiny.toml", *ARGUMENTS, *arguments])


def test_every_case_is_a_process_of_its_own_in_every_round(engines, tmp_path, capsys):
    assert bench("--rounds", "3") == 0
    manual, library = "torch-manual.single", "torch-library.single"
    order = [manual, library, library, manual, manual, library]
    assert engines.launched == [f"round {1 + place // 2}, {name}" for place, name in enumerate(order)]
    assert all(request.timing and not request.ladder for request in engines.requests)
    assert all(request.experiment.train.max_iters == request.timing.steps for request in engines.requests)
    result = read_bench(tmp_path / "b")
    assert (len(result.measurements), result.finished_rounds, result.failures) == (6, 3, [])
    one = result.measurements[0]
    assert (one.wall_ms, one.cpu_ms) == (pytest.approx(10), pytest.approx(20))
    assert (len(one.single_ms), len(one.windows)) == (result.timing.single, result.timing.windows)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["bench.html", BENCH, "stdlib.txt"]
    printed = capsys.readouterr().out
    assert "Fewer than 5 rounds: no interval can be told" in printed
    assert "[" not in next(line for line in printed.splitlines() if "torch-library" in line)
    (tmp_path / "b" / "bench.html").unlink()
    assert main(["report", "b"]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "b" / "bench.html").is_file()
    assert main(["report", "b", "--picture", "a.png"]) == 2
    assert "the page of b has them all" in capsys.readouterr().err


def test_five_rounds_have_intervals(engines, capsys):
    assert bench() == 0
    printed = capsys.readouterr().out
    assert "1.00 [1.00, 1.00]" in next(line for line in printed.splitlines() if "torch-library" in line)
    assert "no interval" not in printed


def test_json_has_rows_and_every_value(engines, capsys):
    assert bench("--rounds", "1", "--json") == 0
    outcome = json.loads(capsys.readouterr().out)
    (rows,) = outcome["rows"].values()
    assert [row["label"] for row in rows] == ["torch-manual", "torch-library"]
    assert rows[0]["wall_ratio"] is None
    assert rows[1]["wall_ratio"]["median"] == pytest.approx(1.0)
    assert len(outcome["result"]["measurements"]) == 2


def test_a_case_that_fails_is_named_tried_once_more_and_ends_no_other(engines, tmp_path, capsys):
    engines.failing = ("torch-library",)
    assert bench("--rounds", "5") == 1
    tries = [name for name in engines.launched if "torch-library" in name]
    assert tries == ["round 1, torch-library.single", "round 2, torch-library.single"]
    result = read_bench(tmp_path / "b")
    assert (len(result.measurements), result.finished_rounds) == (5, 5)
    printed = capsys.readouterr().out
    assert "torch-library.single failed in round 1: torch-library" in printed
    assert (
        "torch-library.single failed in round 2 and is not tried again: torch-library: <b>no</b> luck"
        in printed
    )
    page = (tmp_path / "b" / "bench.html").read_text()
    assert "&lt;b&gt;no&lt;/b&gt; luck" in page
    assert "<b>no</b>" not in page


def test_nothing_finished_is_said(engines, capsys):
    engines.failing = ("torch-manual", "torch-library")
    assert bench("--rounds", "1") == 1
    assert "nothing was measured" in capsys.readouterr().out


@pytest.mark.parametrize("at", [1, 4])
def test_ctrl_c_keeps_and_prints_the_finished_rounds(engines, tmp_path, capsys, at):
    engines.interrupted_at = at
    assert bench("--rounds", "3") == 130
    printed = capsys.readouterr()
    assert f"Kept: {(at - 1) // 2} of 3 rounds, {at - 1} processes" in printed.err
    assert "shardpair bench --continue b" in printed.err
    assert ("torch-manual" in printed.out) == (at > 1)
    assert len(read_bench(tmp_path / "b").measurements) == at - 1
    engines.launched.clear()
    engines.interrupted_at = 0
    assert main(["bench", "--continue", "b", "--quiet"]) == 0
    assert len(engines.launched) == 6 - (at - 1)
    result = read_bench(tmp_path / "b")
    assert (result.finished_rounds, len(result.busy_cores)) == (3, 3)


def test_a_busy_machine_is_refused_before_anything_starts(engines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "busy_cores", lambda: 1.5)
    assert bench() == 3
    assert "this machine is busy: other processes use 1.5 of its" in capsys.readouterr().err
    assert (engines.launched, (tmp_path / "b").exists()) == ([], False)


def test_busy_is_more_than_a_core_s_fifth_and_a_twentieth_of_all(monkeypatch):
    for cores, idle, busy in ((2, 0.1, 0.3), (128, 5.0, 7.0)):
        monkeypatch.setattr(load.psutil, "cpu_count", lambda cores=cores: cores)
        assert not load.is_busy(idle)
        assert load.is_busy(busy)


def test_a_busy_machine_is_on_the_record_if_it_is_wanted(engines, tmp_path, monkeypatch, capsys):
    loads = iter([1.5, 0.0, 1.0])
    monkeypatch.setattr(study, "busy_cores", lambda: next(loads))
    assert bench("--rounds", "3", "--anyway") == 0
    result = read_bench(tmp_path / "b")
    assert (result.anyway, result.busy_cores) == (True, [1.5, 0.0, 1.0])
    said = "Others used the processor before round 1 (1.5 cores), round 3 (1.0 cores)"
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "b" / "bench.html").read_text()


def test_a_machine_that_gets_busy_later_is_on_the_record(engines, monkeypatch, capsys):
    loads = iter([0.0, 2.0])
    monkeypatch.setattr(study, "busy_cores", lambda: next(loads))
    assert bench("--rounds", "2") == 0
    assert "Others used the processor before round 2 (2.0 cores)" in capsys.readouterr().out


def test_figures_are_held_against_what_the_machine_can_do(engines, tmp_path, capsys):
    assert main(["bench", "tiny.toml", "--engines", "torch-manual", "jax-manual", "--rounds", "3"]) == 0
    printed = capsys.readouterr().out
    assert "fastest matrix product on all cores: torchpar float64 1 GFLOP/s." in printed
    assert "left out: ceiling of jaxpar float64: no matmul ceiling: it is shy" in printed
    (folder,) = (tmp_path / "runs").iterdir()
    manual, jax = next(iter(blocks(read_bench(folder)).values()))
    assert manual.of_ceiling == manual.flops_per_s / 1e9
    assert (jax.of_ceiling, jax.mfu) == (None, None)


def test_other_work_is_noticed(engines, capsys):
    engines.loss["torch-library"] = 2.6
    assert bench("--rounds", "1") == 1
    assert "torch-library.single did not do the same work: its last loss is 2.6" in capsys.readouterr().out


def test_a_record_that_is_not_what_was_asked_for_is_a_failure(engines, capsys):
    engines.windows = 1
    assert bench("--rounds", "1") == 1
    assert "it timed 1 of 3 windows" in capsys.readouterr().out


def test_what_cannot_be_is_refused_before_anything_starts(engines, capsys):
    for arguments, message in (
        (["--sizes", "train.batch_size=2000000000"], "make the model or the batch smaller"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--windows", "0"], "must be at least 1"),
        (["--devices", "2"], "--devices 2 without --presets has no effect"),
        (["--baseline", "jax-manual"], "--baseline jax-manual: no such case"),
        (["--train.max_iters", "9"], "--train.max_iters 9 has no effect"),
        (["--presets", "ddp", "--layout.tp", "2"], "--layout.tp 2 has no effect"),
        (["--init_from", "w.safetensors"], "does not depend on the weights"),
        (["--continue", "b"], "leave out --run_dir"),
    ):
        assert bench(*arguments) == 2, arguments
        assert message in capsys.readouterr().err
    assert engines.launched == []


def test_figures_of_two_versions_do_not_mix(engines, tmp_path, tiny, monkeypatch):
    assert bench("--rounds", "1") == 0
    settings, quiet = Settings(), study.Reporter(quiet=True)
    monkeypatch.setattr(study, "git_state", lambda: ("f" * 40, False))
    with pytest.raises(ExperimentError, match="figures of two versions do not mix"):
        continue_bench(tmp_path / "b", anyway=False, settings=settings, reporter=quiet)
    with pytest.raises(RecordError, match=r"has no bench\.json"):
        continue_bench(tmp_path, anyway=False, settings=settings, reporter=quiet)


def test_a_plan_starts_nothing(engines, tmp_path, capsys):
    assert bench("--dry_run", "--presets", "ddp", "pp_zero_bubble", "--devices", "2") == 0
    printed = capsys.readouterr().out
    assert "torch-library.ddp-2" in printed
    assert (engines.launched, (tmp_path / "b").exists()) == ([], False)


def test_saved_after_every_process(engines, tmp_path, tiny, monkeypatch):
    kept = []
    original = study.save

    def save(result, folder):
        original(result, folder)
        kept.append(len(read_bench(folder).measurements))

    monkeypatch.setattr(study, "save", save)
    planned = plan_bench(
        "bench-test",
        tiny,
        Choice(engines=("torch-manual",)),
        timing=TIMING,
        rounds=3,
        baseline="",
        anyway=False,
        settings=Settings(),
    )
    run_bench(planned, run_dir="c", settings=Settings(), reporter=study.Reporter(quiet=True))
    assert kept == [0, 1, 2, 3]


def test_what_others_use_beside_a_process_is_told(engines, monkeypatch, tmp_path, capsys):
    loads = iter([0.0, 1.3])
    monkeypatch.setattr(load.LoadBeside, "cores", lambda self: next(loads))
    assert bench("--rounds", "1") == 0
    said = "Others used the processor beside torch-library.single in round 1 (1.3 cores): these figures may"
    assert said in capsys.readouterr().out
    assert [one.others_cores for one in read_bench(tmp_path / "b").measurements] == [0.0, 1.3]


def test_own_processes_are_no_others(monkeypatch):
    """Beside a child that computes, a machine in which others use two cores all the time."""
    monkeypatch.setattr(load, "_all_s", lambda: load._own_s() + 2 * time.monotonic())
    beside, before = load.LoadBeside(), load._own_s()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert load._own_s() - before >= 0.5
    assert beside.cores() == pytest.approx(2.0, rel=1e-2)


def test_a_bench_from_python(engines, tmp_path, capsys):
    race = api.bench(
        "tiny.toml", engines=["torch-manual", "torch-library"], rounds=5, run_dir="b", quiet=True
    )
    ((manual, library),) = race.rows.values()
    assert manual.wall_ratio is None  # the baseline
    assert library.wall_ratio is not None
    assert library.wall_ratio.holds(1.0)
    assert "Wall time over that of torch-manual, 5 rounds" in repr(race)
    assert race.result == read_bench(race.folder)
    assert capsys.readouterr().out == ""
    with pytest.raises(ExperimentError, match="rounds"):
        api.bench("tiny.toml", rounds=0)
