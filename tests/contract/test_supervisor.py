"""The supervisor of a process: hangs, who is to blame, and how an error is reported."""

import errno
import time

import pytest

from compare.contract.record import Failure, read_failure
from compare.side import supervisor
from compare.side.ending import FAILED, MISSING, DivergedError
from compare.side.process_states import State, read_states, write_state
from compare.side.supervisor import Supervisor
from compare.system.facts import Activity, MissingDevicesError
from tests.support.processes import Busy
from tests.support.warm import run_forked

SHORT_S = 1.0


def compile_long(dog: Supervisor) -> None:
    time.sleep(2 * SHORT_S)


def idle(dog: Supervisor) -> None:
    time.sleep(1000)


def step_without_end(dog: Supervisor) -> None:
    dog.heartbeat.at(5, "compute")
    while True:
        pass


def be_supervised(does, folder) -> int:
    """The main thread of a process that is alone."""
    supervisor.Activity = Busy if does is compile_long else Activity
    dog = Supervisor(side="jaxpar", folder=folder, timeout_s=SHORT_S)
    dog.run(lambda: does(dog))
    return 0


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (compile_long, ""),
        (idle, "process 0 stayed in the start: no progress for 1 s"),
        (step_without_end, "process 0 stayed in step 5, compute: no progress for 1 s"),
    ],
)
@pytest.mark.slow
def test_hang_ends_process(does, message, tmp_path):
    done = run_forked(be_supervised, does, tmp_path)
    assert done.returncode == bool(message), done.stderr
    failure = read_failure(tmp_path)
    assert bool(failure) == bool(message)
    if failure:
        assert failure.message == message
        assert f"in {does.__name__}" in failure.traceback
        assert done.stderr.startswith(f"jaxpar: {message}\n")


@pytest.fixture
def zero(tmp_path, monkeypatch) -> Supervisor:
    """The supervisor of process 0 of four on two hosts, about to give up in step 5."""
    monkeypatch.setattr(supervisor, "SETTLED_S", 0.0)
    monkeypatch.setattr("socket.gethostname", lambda: "host0")
    for number in range(4):
        write_state(tmp_path, State(number=number, host=f"host{number // 2}"))
    zero = Supervisor(side="torchpar", folder=tmp_path, count=4, timeout_s=20)
    for _ in range(9):
        zero.heartbeat.at(5, "forward")
    return zero


def waiting(number: int) -> State:
    return State(number=number, host=f"host{number // 2}", where="step 5, forward", beats=9, waits=True)


LATE = State(number=3, host="host1", where="step 4, record", beats=7, waits=True)
CUT = "no process made progress for 20 s: all wait in step 5, forward, on host0, host1: is the link between"


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([waiting(1)], "processes 2, 3 on host1 gave no answer: no progress for 20 s, while processes 0, 1 "),
        (
            [waiting(1), waiting(3)],
            "process 2 on host1 gave no answer: no progress for 20 s, while processes",
        ),
        ([waiting(1), waiting(2), waiting(3)], CUT),
        ([waiting(1), waiting(2), LATE], "process 3 on host1 stayed in step 4, record: "),
        ([State(number=3, failure=Failure(message="process 3 failed"))], "process 3 failed"),
    ],
    ids=["silent host", "silent process", "cut link", "behind", "failed"],
)
def test_hang_names_who_is_to_blame(others, message, zero):
    for state in others:
        write_state(zero.folder, state)
    failure = zero.find_hang()
    assert failure
    assert failure.message.startswith(message)


def test_late_waiters_are_not_silent(zero, monkeypatch):
    """The other processes notice the time-out in turn, after process 0."""
    later = map(waiting, (1, 2, 3))
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: write_state(zero.folder, next(later)))
    failure = zero.find_hang()
    assert failure
    assert failure.message.startswith(CUT)


def test_computing_process_is_waited_for(zero, monkeypatch):
    busy = State(number=3, host="host1", looks=1)
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: write_state(zero.folder, busy))
    assert zero.find_hang() is None
    assert not read_states(zero.folder)[0].waits


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MissingDevicesError("needs 8\ndevices"), MISSING, "needs 8 devices"),
        (ModuleNotFoundError("no optax"), MISSING, "no optax"),
        (DivergedError("loss is nan"), FAILED, "loss is nan"),
        (ValueError("odd"), FAILED, "ValueError: odd"),
        (FULL, FAILED, "FOLDER: No space left on device: make room, and run again"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failure_of_an_error(error, code, message, tmp_path):
    alone = Supervisor(side="jaxpar", folder=tmp_path)
    failure = alone.failure_of(error)
    assert (failure.message, failure.exit_code) == (message.replace("FOLDER", str(tmp_path)), code)
    assert bool(failure.traceback) == isinstance(error, ValueError)
    several = Supervisor(side="jaxpar", folder=tmp_path, count=2).failure_of(error)
    assert several.exit_code == code
    assert several.message.startswith("process 0 on ") != isinstance(error, DivergedError)
