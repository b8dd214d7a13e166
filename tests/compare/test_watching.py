"""The harness's watch of an engine: it ends a stopped or idle process, and no process that computes."""

import sys
import time

import pytest

from compare.contract.record import STEPS_PART
from compare.execute import watch
from compare.execute.launchers import HERE, Hosts
from compare.side.process_states import State, write_state
from compare.system.facts import LOOK_S, Activity
from tests.support import processes
from tests.support.processes import Busy, start

pytestmark = pytest.mark.slow
SHORT_S = 1.0
SLURM = Hosts(launcher="slurm", count=2)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A function that runs a script under the watch, and returns the reason to end it."""
    monkeypatch.setattr(watch, "GRACE_S", 0.0)

    def run(script: str, hosts: Hosts = HERE) -> str:
        process = start([sys.executable, "-ISc", "import os, signal, sys, time\n" + script, str(tmp_path)])
        ended = watch.watch(process, tmp_path, hosts, timeout_s=SHORT_S, on_step=lambda step: None)
        processes.end_all(grace_s=0.0)
        process.communicate()
        return ended.message.replace(str(process.pid), "PID") if ended else ""

    return run


FORK_THAT_COMPUTES = """
if os.fork():
    print("waits", flush=True)
    sys.exit(os.wait()[1])
while True: pass
"""
# A rank that goes on while the process that watches it is stopped.
STEPS_OF_A_STOPPED_SIDE = f"""
path = sys.argv[1] + "/{STEPS_PART}"
if not os.fork():
    while True:
        with open(path, "ab") as steps:
            steps.write(b'{{"step":0,"loss":1,"grad_norm":1,"lr":1,"step_time_ms":1}}\\n')
        time.sleep(0.1)
while not os.path.exists(path):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_idle_engine_is_ended(watched):
    assert watched("time.sleep(1000)").startswith(
        "no progress for 1 s after 0 steps: process PID computes nothing, so it was ended: "
    )


def test_stopped_engine_is_ended(watched, monkeypatch):
    monkeypatch.setattr(watch, "Activity", Busy)
    stopped = watched(STEPS_OF_A_STOPPED_SIDE)
    assert "process PID is stopped (SIGSTOP, or a debugger), so it was ended" in stopped
    assert "after 0 steps" not in stopped


def test_computing_engine_is_not_ended(watched, monkeypatch):
    monkeypatch.setattr(watch, "Activity", Busy)
    assert watched("time.sleep(2)") == ""


def test_idle_launcher_is_not_ended(watched, tmp_path):
    write_state(tmp_path, State(number=0, host="host0"))
    assert watched("time.sleep(2)", SLURM) == ""  # its processes may compute on other hosts


def test_srun_without_processes_is_ended(watched):
    assert watched("time.sleep(1000)", SLURM) == "srun started no process in 1 s: is another step running?"


def test_missing_process_is_named(watched, tmp_path):
    write_state(tmp_path, State(number=0, host="host0"))
    write_state(tmp_path, State(number=1, host="host1", where=watch.NOT_STARTED))
    absent = watched("time.sleep(1000)", Hosts(launcher="torchrun", count=2))
    assert absent.startswith("process 1 on host1 did not start: no progress for 1 s, while process 0")


def test_activity_includes_child_processes():
    process = start([sys.executable, "-ISc", "import os, sys\n" + FORK_THAT_COMPUTES])
    assert process.stdout.readline() == "waits\n"
    activity = Activity(process.pid)
    is_seen = any(time.sleep(LOOK_S) or activity.is_busy() for _ in range(30))
    processes.end_all(grace_s=0.0)
    process.communicate()
    assert is_seen
