"""Workers: the one to blame is named, the others get a short time, and none outlives its parent."""

import os
import pickle
import signal
import sys
import time
from multiprocessing import Pipe
from multiprocessing.context import ForkContext

import psutil
import pytest

from compare.system import workers as module
from compare.system.workers import (
    Outcome,
    WorkerError,
    Workers,
    answer_calls,
    blamed_of,
    end_with_parent,
    raise_blamed,
)
from tests.support import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


class Lost(Exception):
    """The loss of another worker."""


class Local(Exception):
    """An error that cannot be pickled."""

    def __init__(self, one, two):
        super().__init__(one)


def act(number, calls):
    call = calls[number]
    if call == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if call == "abort":
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGABRT)
    if call == "local":
        raise Local("one", "two")
    if call == "hang":
        time.sleep(600)
    if isinstance(call, Exception):
        raise call
    return call


class Process:
    def __init__(self, process):
        self.process, self.pid, self.kill = process, process.pid, process.kill

    def wait(self):
        self.process.join()
        return self.process.exitcode


def serve(number, pipe, parent):
    end_with_parent(parent)
    answer_calls(
        pipe, lambda message: act(number, pickle.loads(message)), lambda error: isinstance(error, Lost)
    )
    os._exit(0)


@pytest.fixture
def workers():
    def start(number):
        ours, theirs = Pipe()
        with theirs:
            process = ForkContext().Process(target=serve, args=(number, theirs, os.getpid()))
            process.start()
        return Process(process), ours

    workers = Workers(3, start)
    started = [psutil.Process(process.pid) for process, _ in workers.members]
    yield workers
    workers.end()
    processes.assert_gone(started)


def call(workers, *calls, timeout_s=60.0):
    return workers.call(pickle.dumps(calls), timeout_s=timeout_s)


def test_results_are_in_order(workers):
    for results in ([1, 2, 3], ["a", None, {}]):
        answers = call(workers, *results)
        assert [answer.value for answer in answers] == results
        assert blamed_of(answers) is None
        assert workers.describe(answers, timeout_s=1.0) == ""


@pytest.mark.parametrize(
    ("calls", "blamed", "words"),
    [
        (["hang", KeyError("x"), 1], 1, "rank 1 of 3 failed: KeyError: 'x'\nTraceback"),
        ([Lost("peer"), KeyError("x"), "hang"], 1, "rank 1 of 3 failed:"),
        ([Lost("peer"), 1, "die"], 2, "rank 2 of 3: killed by SIGKILL"),
        (["abort", ValueError("y"), 1], 1, "ValueError: y"),
        ([1, Lost("peer"), 1], 1, "Lost: peer"),
        (["hang", 1, "hang"], 0, "no answer within 0.5 s from ranks 0, 2"),
        ([1, 1, "hang"], 2, "no answer within 0.5 s from rank 2"),
    ],
)
def test_worker_to_blame(workers, calls, blamed, words):
    hangs_alone = not any(isinstance(call, Exception) or call in ("die", "abort") for call in calls)
    timeout_s = 0.5 if hangs_alone else 60.0
    answers = call(workers, *calls, timeout_s=timeout_s)
    found = blamed_of(answers)
    assert found is not None
    assert found.worker == blamed
    assert words in workers.describe(answers, timeout_s=timeout_s)
    assert (found.outcome is Outcome.SILENT) == hangs_alone


def test_others_get_a_short_time(workers, monkeypatch):
    waits, wait = [], module.wait

    def noted(pipes, timeout):
        waits.append(timeout)
        return wait(pipes, timeout=timeout)

    monkeypatch.setattr(module, "wait", noted)
    call(workers, KeyError("x"), "hang", 1, timeout_s=5.0)
    assert waits[-1] <= module.GRACE_S


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyError("x"), KeyError), ("local", WorkerError)], ids=["sent", "text"]
)
def test_error_is_raised_with_its_traceback(workers, error, raised):
    answers = call(workers, 1, error, 1)
    with pytest.raises(raised) as found:
        raise_blamed(workers, answers, timeout_s=60.0)
    assert "in act" in str(found.value.__cause__ or found.value)


def test_unpicklable_result_is_a_failure(workers):
    answers = call(workers, 1, 2, 3)
    assert all(answer.outcome is Outcome.DONE for answer in answers)
    workers.end(grace_s=60.0)
    assert workers.members == []
