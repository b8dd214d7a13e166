"""Progress: which engine of how many, step, loss, speed, time left; in a terminal, in a pipe, in silence."""

import contextlib
import io
import os
import pty
import select
import threading

import pytest
from processes import PATIENCE_S
from records import make_request
from rich.console import Console
from rich.spinner import Spinner

from compare.cli import main
from compare.contract.record import STEPS_PART, Step
from compare.execute import progress
from compare.execute.launch import EngineError
from compare.execute.pace import Cadence, Pace
from compare.execute.progress import Reporter
from compare.spec.experiment import edited

NAMES = ["jax-manual", "torch-manual", "torch-library"]


def step(number: int, loss: float = 2.5) -> Step:
    return Step(step=number, loss=loss, grad_norm=1.0, lr=0.1, step_time_ms=1.0)


@pytest.fixture
def requests(tiny):
    """Three engines, 100 steps each, 64 tokens a step."""
    experiment = edited(tiny, {"train": {"max_iters": 100}})
    return {name: make_request(experiment, engine=name) for name in NAMES}


def test_pace_knows_place_step_speed_and_time_left(tmp_path, requests):
    pace = Pace(requests, tmp_path, (), now=1000)
    pace.begin("jax-manual", now=1000)
    assert pace.line(now=1004) == "engine 1 of 3: jax-manual: starting, 4.0 s so far"
    assert pace.left_s(now=1004) is None  # nothing is known: nothing is claimed
    for number in range(11):
        pace.step(step(number), now=1020 + 2 * number)  # 20 s of start-up, then 2 s a step
    assert pace.left_s(now=1040) == pytest.approx(89 * 2 + 2 * (20 + 100 * 2))
    assert pace.line(now=1040) == (
        "engine 1 of 3: jax-manual: step 11 of 100, loss 2.5000, 32 tokens/s, 40 s so far, "
        "about 10 min 18 s left in all"
    )
    pace.end()
    pace.begin("torch-manual", now=1300)
    assert pace.left_s(now=1310) == pytest.approx(
        220 - 10 + 220
    )  # as long as the first one, as far as we know
    pace.step(step(0), now=1310)
    pace.step(step(1), now=1311)  # twice as fast: what is to come is the mean of both
    assert pace.left_s(now=1311) == pytest.approx(98 + (15 + 150))
    pace.step(step(99), now=1409)
    pace.end()
    assert pace.outcome(now=1410) == (
        "engine 2 of 3: torch-manual: 100 steps in 1 min 50 s (10 s to the first step), loss 2.5000, "
        "64 tokens/s"
    )


def test_steps_that_arrive_together_give_no_speed(tmp_path, requests):
    pace = Pace(requests, tmp_path, (), now=0)
    pace.begin("jax-manual", now=0)
    for number in range(5):
        pace.step(step(number), now=3)
    assert pace.left_s(now=3) is None
    assert "tokens/s" not in pace.line(now=3)


def test_what_an_engine_does_before_its_first_step(tmp_path, requests):
    pace = Pace(requests, tmp_path, finished={"torch-library"}, now=0)
    for name, doing in (("jax-manual", "setting up and compiling"), ("torch-manual", "at the first step")):
        pace.begin(name, now=0)
        assert pace.doing() == "starting"
        (tmp_path / name).mkdir()
        (tmp_path / name / STEPS_PART).touch()
        assert pace.doing() == doing
        pace.end()
    pace.step(step(99), now=1)
    assert pace.doing() == "step 100 of 100, finishing"


def test_one_case_alone_and_cases_that_are_no_engines(tmp_path, requests):
    alone = Pace({"jax-manual": requests["jax-manual"]}, tmp_path, (), now=0)
    alone.begin("jax-manual", now=0)
    alone.step(step(0), now=1)
    alone.step(step(1), now=2)
    assert alone.line(now=2).endswith("about 1 min 38 s left")
    assert alone.place() == "jax-manual"
    cases = Pace({"reference": requests["torch-manual"], **requests}, tmp_path, {"reference"}, now=0)
    cases.begin("jax-manual", now=0)
    assert cases.place() == "case 2 of 4: jax-manual"


def lines_of(total_s: float, *, engines: int) -> int:
    """Number of lines that a run of so long leaves in a pipe, beside the two of each engine."""
    cadence, lines = Cadence(0), 0
    for engine in range(engines):
        begun, each_s = engine * total_s / engines, total_s / engines
        cadence.begin(begun)
        lines += sum(cadence.is_due(second / each_s, begun + second) for second in range(1, int(each_s)))
    return lines


def test_a_pipe_is_never_flooded_nor_left_alone():
    assert lines_of(32, engines=4) == 0
    assert 10 <= lines_of(4 * 60, engines=4) <= 25
    assert 20 <= lines_of(30 * 60, engines=4) <= 60
    assert 20 <= lines_of(30 * 60, engines=1) <= 60
    assert 50 <= lines_of(10 * 3600, engines=1) <= 120
    cadence = Cadence(0)
    assert [second for second in range(200) if cadence.is_due(0.0, second)] == [60, 120, 180]  # it compiles


def test_a_pipe_reads_lines(tmp_path, requests, capsys):
    reporter = Reporter()
    reporter.start({"[/x]": requests["jax-manual"], ":smile:": requests["torch-manual"]}, tmp_path)
    with reporter.engine("[/x]") as on_step:
        on_step(step(99))
    with contextlib.suppress(EngineError), reporter.engine(":smile:") as on_step:
        on_step(step(0))
        raise EngineError("no luck [/y]", exit_code=1)
    log = tmp_path / "log.txt"
    log.write_text("the screen \x1b[2J is not cleared\n")
    reporter.failed(EngineError("no luck", exit_code=1, log=log))
    reporter.failed(EngineError(f"no luck {'long ' * 40}[/y]", exit_code=1))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "case 1 of 2: [/x]: starting"
    assert err.splitlines()[1].startswith("case 1 of 2: [/x]: 100 steps in 0.0 s (0.0 s to the first step)")
    assert "case 2 of 2: :smile:: stopped after 1 step of 100 in 0.0 s" in err
    assert err.splitlines()[-1].endswith("long [/y]")  # not cut, not folded, and no markup
    assert "\x1b" not in err
    assert "the screen \\x1b[2J is not cleared" in err


def test_an_engine_without_steps_is_spoken_of(tmp_path, requests, capsys, monkeypatch):
    said = threading.Event()
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    monkeypatch.setattr(Cadence, "is_due", lambda self, fraction, now: said.set() or True)
    reporter = Reporter()
    reporter.start(requests, tmp_path)
    with reporter.engine("jax-manual"):
        assert said.wait(timeout=PATIENCE_S)
    assert "engine 1 of 3: jax-manual: starting, 0.0 s so far" in capsys.readouterr().err
    assert not [thread for thread in threading.enumerate() if "talk" in thread.name]


def test_silence(tmp_path, requests, capsys):
    reporter = Reporter(quiet=True)
    reporter.start(requests, tmp_path)
    with reporter.engine("jax-manual") as on_step:
        on_step(step(0))
    reporter.failed(EngineError("no luck", exit_code=1))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), OSError(28, "No space left on device")])
def test_nobody_reading_does_not_end_a_run(tmp_path, requests, monkeypatch, error):
    class Gone(io.StringIO):
        def write(self, text):
            raise error

        flush = write

    monkeypatch.setattr("sys.stderr", Gone())
    reporter = Reporter()
    reporter.start(requests, tmp_path)
    with reporter.engine("jax-manual") as on_step:
        on_step(step(0))
    reporter.failed(EngineError("no luck", exit_code=1))


def test_a_terminal_sees_a_bar(tmp_path, requests, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    primary, replica = pty.openpty()
    with os.fdopen(replica, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        reporter = Reporter()
        reporter.start(requests, tmp_path)
        with reporter.engine("jax-manual") as on_step:
            on_step(step(0))
        seen = ""
        while "stopped after" not in seen and select.select([primary], [], [], 10)[0]:
            seen += os.read(primary, 100_000).decode(errors="replace")
    os.close(primary)
    assert "\x1b[?25l" in seen  # the cursor is hidden ...
    assert "\x1b[?25h" in seen  # ... and comes back
    assert "step 1 of 100" in seen
    assert "engine 1 of 3: jax-manual: stopped after 1 step of 100" in seen


def test_a_narrow_terminal_still_sees_two_lines(tmp_path, requests):
    pace = Pace(requests, tmp_path, (), now=0)
    pace.begin("torch-library", now=0)
    for number in (0, 70):
        pace.step(step(number), now=number + 1)
    console = Console(file=io.StringIO(), width=72, force_terminal=True, color_system=None)
    console.print(progress._drawn(pace, Spinner("dots"), 71.0))
    first, second = console.file.getvalue().splitlines()
    assert "engine 3 of 3: torch-library" in first
    assert first.rstrip().endswith("step 71 of 100")
    assert second.startswith("  loss 2.5000, 64 tokens/s, 1 min 11 s so far, about ")


def test_a_study_tells_the_reporter_and_continuing_counts_what_is_finished(engines, capsys):
    engines.failing = {"torch-manual": EngineError("torch-manual: no luck", exit_code=1)}
    assert main(["run", "tiny.toml", "--engines", "jax-manual", "torch-manual", "--run_dir", "r"]) == 1
    told = capsys.readouterr().err
    assert "engine 1 of 2: jax-manual: 3 steps in" in told
    assert "engine 2 of 2: torch-manual: stopped after 0 steps of 3" in told
    engines.failing = {}
    assert main(["run", "--continue", "r"]) == 0
    told = capsys.readouterr().err
    assert "engine 2 of 2: torch-manual: 3 steps in" in told
    assert "jax-manual" not in told
