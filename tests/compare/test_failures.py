"""The cause of an engine's failure and its exit code."""

import signal

import pytest

from compare.contract.record import Failure, leave_failure
from compare.execute.failures import LOG, find_cause
from compare.side.ending import STOPPED
from compare.side.process_states import State, write_state

KILLED = "srun: error: host1: task 1: Killed"
SRUN = f"""
0: rank 0 on host0 failed at step 3: RuntimeError: Connection closed by peer
{KILLED}
srun: Terminating StepId=1.0
srun: error: host0: task 0: Exited with exit code 1
"""
UNBOUND = "srun: error: cluster configuration lacks support for cpu binding\n"
LIMIT = "slurmstepd-host0: error: *** STEP 7.1 ON host0 CANCELLED AT 14:11:15 DUE TO TIME LIMIT ***"
LOST = Failure(message="connection closed by peer", is_consequence=True)
BUG = Failure(message="process 0 on host0 failed: a bad batch")
HANG = Failure(message="no progress for 55 s")


@pytest.mark.parametrize(
    ("log", "failure", "ended", "message"),
    [
        (SRUN, BUG, None, BUG.message),
        (SRUN, LOST, None, f"{KILLED}: {LOST.message}"),
        (SRUN, None, HANG, KILLED),
        (LIMIT, None, None, LIMIT),
        (f"0: {LIMIT}\n{KILLED}", None, None, LIMIT),
        ("", LOST, HANG, LOST.message),
        ("", None, HANG, HANG.message),
        ("Traceback\nOSError: Read-only file system\n", None, None, "OSError: Read-only file system"),
        (f"{UNBOUND}torchpar: no rank 3\n", None, None, "torchpar: no rank 3"),
        (f"{UNBOUND}{KILLED}", None, None, KILLED),
        ("Timeout (0:00:30)!\n  File\n", None, None, "Timeout (0:00:30)!"),
        ("", None, None, "left with exit code 1 and no message"),
    ],
    ids=[
        *("error", "lost", "srun", "limit", "label", "lost in a hang", "hang", "log", "noise", "killed"),
        *("fatal", "nothing"),
    ],
)
def test_cause_is_the_best_known(log, failure, ended, message, tmp_path):
    (tmp_path / LOG).write_text(log)
    if failure:
        leave_failure(tmp_path, failure)
    cause = find_cause(1, tmp_path, ended)
    assert (cause.message, cause.exit_code, cause.is_consequence) == (message, 1, False)


def test_lost_process_is_named(tmp_path):
    (tmp_path / LOG).write_text("")
    leave_failure(tmp_path, LOST)
    write_state(tmp_path, State(number=0, host="host0", failure=LOST))
    write_state(tmp_path, State(number=1, host="host1"))
    cause = find_cause(1, tmp_path)
    assert cause.message == "process 1 on host1 wrote no error: connection closed by peer"
    assert cause.rank == 1


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd-host1: error: execve(): .venv/bin/python: No such file or directory",
        "torchpar: process 1 on host1 cannot write into RUN: Read-only file system",
    ],
    ids=["interpreter", "folder"],
)
def test_cause_that_a_host_only_prints(line, tmp_path):
    exited = "srun: error: host1: task 1: Exited with exit code 2"
    (tmp_path / LOG).write_text(f"{exited}\n1: {line}\n0: {LIMIT}\nsrun: error: host0: task 0: Terminated\n")
    cause = find_cause(143, tmp_path)
    assert (cause.message, cause.exit_code) == (line, 2)


@pytest.mark.parametrize(
    ("returncode", "failure", "code"),
    [
        (143, Failure(message="node0:29500: taken", exit_code=2), 2),
        (143, Failure(message="connection closed", exit_code=2, is_consequence=True), 1),
        (4, Failure(message="stopped", exit_code=4), 4),
        (3, None, 3),
        (-9, BUG, 1),
        (-signal.SIGUSR1, None, STOPPED),
        (1, Failure(message="srun: error: host0: task 0: User defined signal 1", rank=0), STOPPED),
    ],
)
def test_exit_code_is_that_of_the_cause(returncode, failure, code, tmp_path):
    (tmp_path / LOG).write_text("")
    if failure:
        leave_failure(tmp_path, failure)
    cause = find_cause(returncode, tmp_path)
    assert cause.exit_code == code
    assert "killed" not in cause.message or code != STOPPED
