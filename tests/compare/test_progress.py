"""Progress: case, step, loss, speed, time left; in a terminal, in a pipe, and quiet."""

import contextlib
import io
import os
import pty
import re
import select

import pytest

from compare.contract.record import Step
from compare.execute import progress
from compare.execute.launch import EngineError
from compare.execute.progress import Pace, Reporter
from compare.spec.experiment import edited
from tests.support.records import make_request


def step(number: int) -> Step:
    return Step(step=number, loss=2.5, grad_norm=1.0, lr=0.1, step_time_ms=1000.0)


@pytest.fixture
def requests(tiny):
    """Two cases with odd names, 100 steps each, 64 tokens a step."""
    request = make_request(edited(tiny, {"train": {"max_iters": 100}}), engine="jax-manual")
    return {"[/x]": request, ":smile:": request}


def test_pace_gives_speed_and_time_left(requests, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    case = Pace("2 of 3: torch-manual", requests["[/x]"])
    case.step(step(0))
    case.step(step(0))
    assert case.figures() == "loss 2.5000, 64 tokens/s, about 1 min 39 s left"  # read at once, made in 1 s
    case = Pace("2 of 3: torch-manual", requests["[/x]"])
    assert f"{case}" == "2 of 3: torch-manual: step 0 of 100, no step yet"
    for number in range(11):  # 20 s of start-up, then 2 s a step
        now = 1020.0 + 2 * number
        case.step(step(number))
    assert case.figures() == "loss 2.5000, 32 tokens/s, about 2 min 58 s left"
    for number in range(11, 100):
        now = 1020.0 + 2 * number
        case.step(step(number))
    assert case.outcome == "2 of 3: torch-manual: 100 steps in 3 min 38 s, loss 2.5000, 32 tokens/s"


def test_pipe_gets_lines(tmp_path, requests, capsys, monkeypatch):
    reporter = Reporter()
    reporter.start(requests)
    with reporter.engine("[/x]") as on_step:
        monkeypatch.setattr(progress, "LINE_S", -1.0)
        on_step(step(98))
        monkeypatch.undo()
        on_step(step(99))
    with contextlib.suppress(EngineError), reporter.engine(":smile:") as on_step:
        on_step(step(0))
        raise EngineError("no luck [/y]", exit_code=1)
    log = tmp_path / "log.txt"
    noise = "srun: error: cluster configuration lacks support for cpu binding"
    log.write_text(f"{noise}\nthe screen \x1b[2J is not cleared\n")
    reporter.failed(EngineError(f"no luck {'long ' * 40}[/y]", exit_code=1, log=log))
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[:2] == ["1 of 2: [/x]: starting", "1 of 2: [/x]: step 99 of 100, loss 2.5000"]
    assert re.match(r"1 of 2: \[/x\]: 100 steps in \d\.\d s, loss 2\.5000", lines[2])
    assert re.search(r"2 of 2: :smile:: stopped after 1 step of 100 in \d\.\d s", err)
    assert lines[-1].endswith("long [/y]")  # one line, without markup
    assert "the screen \\x1b[2J is not cleared" in err
    assert noise not in err


def test_quiet_or_closed_stderr(requests, capsys, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "gone")

        flush = write

    for quiet in (True, False):
        reporter = Reporter(quiet=quiet)
        reporter.start(requests)
        with reporter.engine("[/x]") as on_step, reporter.waits("for it"):
            on_step(step(0))
        reporter.failed(EngineError("no luck", exit_code=1))
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr("sys.stderr", Gone())


def test_terminal_gets_a_bar(requests, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    primary, replica = pty.openpty()
    with os.fdopen(replica, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        reporter = Reporter()
        reporter.start(requests)
        with reporter.engine("[/x]") as on_step:
            on_step(step(0))
        seen = ""
        while "stopped after" not in seen and select.select([primary], [], [], 10)[0]:
            seen += os.read(primary, 100_000).decode(errors="replace")
    os.close(primary)
    assert "\x1b[?25l" in seen  # the cursor is hidden ...
    assert "\x1b[?25h" in seen  # ... and comes back
    assert "━" in seen
    assert "1 of 2: [/x]: step 1 of 100, loss 2.5000" in seen
    assert "1 of 2: [/x]: stopped after 1 step of 100" in seen
