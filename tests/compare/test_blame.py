"""Why an engine failed, and its exit code: its own words before those of srun."""

from compare.contract.record import ERROR, Failure, leave_failure
from compare.execute.blame import LOG, seen_by_srun, why

SRUN = """
jaxpar: process 0 on host0: JaxRuntimeError: Gloo all-reduce failed: Connection closed by peer
srun: error: host1: task 1: Killed
srun: Terminating StepId=1.0
srun: error: host0: task 0: Exited with exit code 1
"""


CANCELLED = "slurmstepd-host0: error: *** STEP 7.1 ON host0 CANCELLED AT 2026-11-24T14:11:15"


def test_srun_says_which_process_of_which_host_failed():
    for log, says in {
        SRUN: "srun: host1: task 1: Killed",
        "srun: error: Node failure on host1\n" + SRUN: "srun: Node failure on host1",
        f"{CANCELLED} DUE TO TIME LIMIT ***": f"SLURM: {CANCELLED.partition('*** ')[2]} DUE TO TIME LIMIT",
        f"srun: launch/slurm: _step_signal: Terminating StepId=1.1\n{CANCELLED} ***": "",
        "srun: error: host0: task 0: Exited with exit code 1": "",
    }.items():
        assert seen_by_srun(log) == says


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
    ):
        leave_failure(tmp_path, failure)
        assert why(returncode, tmp_path).exit_code == code
        (tmp_path / ERROR).unlink()
    assert why(3, tmp_path).exit_code == 3
