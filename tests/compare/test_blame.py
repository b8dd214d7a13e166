"""Why an engine failed, and its exit code: its own words before those of srun."""

import signal

from compare.contract.record import ERROR, Failure, leave_failure
from compare.execute.failures import LOG, seen_by_srun, why
from compare.side.ending import STOPPED

SRUN = """
jaxpar: process 0 on host0: JaxRuntimeError: Gloo all-reduce failed: Connection closed by peer
srun: error: host1: task 1: Killed
srun: Terminating StepId=1.0
srun: error: host0: task 0: Exited with exit code 1
"""


LEFT = """
0: step 19 took 12 ms
1: Traceback (most recent call last):
1: OSError: [Errno 30] Read-only file system
1:
srun: error: host1: task 1: Exited with exit code 1
srun: Terminating StepId=1.0
0: rank 0 was ended by SIGTERM (host0)
srun: error: host0: task 0: Exited with exit code 143
"""
CANCELLED = "slurmstepd-host0: error: *** STEP 7.1 ON host0 CANCELLED AT 2026-11-24T14:11:15"


def test_srun_says_which_process_of_which_host_failed():
    for log, says in {
        SRUN: "srun: host1: task 1: Killed",
        "srun: error: Node failure on host1\n" + SRUN: "srun: Node failure on host1",
        f"{CANCELLED} DUE TO TIME LIMIT ***": f"SLURM: {CANCELLED.partition('*** ')[2]} DUE TO TIME LIMIT",
        f"srun: launch/slurm: _step_signal: Terminating StepId=1.1\n{CANCELLED} ***": "",
        "srun: Terminating StepId=1.0\nsrun: error: host0: task 0: Exited with exit code 1": "",
        LEFT: "srun: host1: task 1: Exited with exit code 1: OSError: [Errno 30] Read-only file system",
    }.items():
        said = seen_by_srun(log)
        assert (said.message if said else "") == says


def test_a_host_that_failed_without_a_word_of_its_own_is_named(tmp_path):
    """Its process could not write: the other, which srun ended, is not to blame."""
    (tmp_path / LOG).write_text(LEFT)
    leave_failure(
        tmp_path, Failure(message="rank 0 was ended by SIGTERM (host0)", is_consequence=True, rank=0)
    )
    cause = why(1, tmp_path)
    assert cause.message.startswith("srun: host1: task 1: Exited")
    assert (cause.rank, cause.exit_code) == (1, 1)


def test_srun_comes_before_a_consequence_and_after_a_cause(tmp_path):
    (tmp_path / LOG).write_text(SRUN)
    leave_failure(tmp_path, Failure(message="connection closed by peer", is_consequence=True))
    assert why(1, tmp_path).message == "srun: host1: task 1: Killed"
    leave_failure(tmp_path, Failure(message="process 0 on host0: a bad batch"))
    assert why(1, tmp_path).message == "process 0 on host0: a bad batch"


def test_the_exit_code_is_that_of_the_process_that_failed_first(tmp_path):
    (tmp_path / LOG).write_text("")
    for returncode, failure, code in (
        (143, Failure(message="node0:29500: taken", exit_code=2), 2),  # srun ended the other
        (143, Failure(message="connection closed", exit_code=2, is_consequence=True), 1),
        (4, Failure(message="stopped", exit_code=4), 4),
        (-9, Failure(message="a bad batch"), 1),
        (-signal.SIGUSR1, None, STOPPED),  # before it listened
        (1, Failure(message="srun: host0: task 0: User defined signal 1", rank=0), STOPPED),
    ):
        if failure:
            leave_failure(tmp_path, failure)
        assert why(returncode, tmp_path).exit_code == code
        (tmp_path / ERROR).unlink(missing_ok=True)
    assert why(3, tmp_path).exit_code == 3
    assert why(-9, tmp_path, launcher="srun").message.startswith("srun was killed by SIGKILL")


def test_what_is_known_comes_before_that_nothing_moves(tmp_path):
    hangs = Failure(message="no progress for 55 s")
    (tmp_path / LOG).write_text("")
    assert why(-9, tmp_path, hangs) == hangs
    leave_failure(tmp_path, Failure(message="connection closed by peer", is_consequence=True))
    assert why(-9, tmp_path, hangs).message == "connection closed by peer"
    (tmp_path / LOG).write_text(SRUN)
    assert why(-9, tmp_path, hangs).message == "srun: host1: task 1: Killed"
