"""Why an engine failed, and its exit code: its own words before those of srun."""

import pytest

from compare.contract.record import Failure, write_failure
from compare.execute.blame import LOG, code_of_cause, seen_by_srun, why

SRUN = """
jaxpar: process 0 on host0: JaxRuntimeError: Gloo all-reduce failed: Connection closed by peer
srun: error: host1: task 1: Killed
srun: Terminating StepId=1.0
srun: error: host0: task 0: Exited with exit code 1
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (SRUN, "process 1 on host1: killed, says srun"),
        (
            SRUN.replace("task 1: Killed", "tasks 1,3: Segmentation fault (core dumped)"),
            "process 1,3 on host1: ",
        ),
        ("srun: error: Node failure on host1\n" + SRUN, "SLURM lost host1 (node failure)"),
        (
            "slurmstepd: error: *** STEP 1.0 ON host0 CANCELLED AT 2026-11-24T13:00:00 DUE TO TIME LIMIT ***",
            "SLURM cancelled the job due to time limit",
        ),
        (
            "slurmstepd-host0: error: *** STEP 7.1 ON host0 CANCELLED AT 2026-11-24T14:11:15 ***",
            "SLURM cancelled",
        ),
        (
            "srun: launch/slurm: _step_signal: Terminating StepId=1.1\n"
            "slurmstepd-host0: error: *** STEP 1.1 ON host0 CANCELLED AT 2026-11-24T14:07:05 ***",
            "",
        ),
        ("srun: error: host0: task 0: Exited with exit code 1", ""),
    ],
)
def test_srun_says_which_process_of_which_host_failed(log, expected):
    found = seen_by_srun(log)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_srun_comes_before_a_consequence_and_after_a_cause(tmp_path):
    (tmp_path / LOG).write_text(SRUN)
    write_failure(tmp_path, Failure(message="connection closed by peer", is_consequence=True))
    assert why(1, tmp_path) == "process 1 on host1: killed, says srun"
    write_failure(tmp_path, Failure(message="process 0 on host0: a bad batch"))
    assert why(1, tmp_path) == "process 0 on host0: a bad batch"


@pytest.mark.parametrize(
    ("returncode", "left", "code"),
    [
        (
            143,
            Failure(message="node0:29500 (the coordinator): taken", exit_code=2),
            2,
        ),  # srun ended the other
        (143, Failure(message="a bad batch"), 1),
        (143, Failure(message="connection closed", exit_code=2, is_consequence=True), 1),
        (4, Failure(message="stopped", exit_code=4), 4),
        (3, None, 3),
        (-9, None, 1),
    ],
)
def test_the_exit_code_is_that_of_the_process_that_failed_first(tmp_path, returncode, left, code):
    if left:
        write_failure(tmp_path, left)
    assert code_of_cause(returncode, tmp_path) == code
