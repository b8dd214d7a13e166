"""Hangs: a long compilation is none, a stopped or idle process and an endless step are."""

import sys
import time

import pytest

from compare.contract.record import STATE, STEPS_PART
from compare.execute import watch
from compare.execute.launchers import HERE, Hosts
from compare.side.process_states import State, write_state
from compare.system.facts import LOOK_S, Activity
from tests.support import processes
from tests.support.processes import Busy, start

SHORT_S = 1.0


def watched(script: str, folder, monkeypatch, *, elsewhere: bool = False) -> str:
    """The harness's words on a process, which is ended then."""
    monkeypatch.setattr(watch, "GRACE_S", 0.0)
    process = start([sys.executable, "-ISc", "import os, signal, sys, time\n" + script, str(folder)])
    hosts = Hosts(launcher="slurm", count=2) if elsewhere else HERE
    ended = watch.watch(process, folder, hosts, timeout_s=SHORT_S, on_step=lambda step: None)
    processes.end_all(grace_s=0.0)
    process.communicate()
    return ended.message.replace(str(process.pid), "PID") if ended else ""


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


@pytest.mark.slow
def test_the_harness_ends_what_is_stopped_or_idle_and_not_what_computes(tmp_path, monkeypatch):
    idle = watched("time.sleep(1000)", tmp_path, monkeypatch)
    assert idle.startswith(
        "no progress for 1 s after 0 steps: process PID computes nothing, so it was ended: "
    )
    assert watched("time.sleep(2)", tmp_path, monkeypatch, elsewhere=True) == ""  # there it may compute
    write_state(tmp_path, State(number=0, host="host0"))
    write_state(tmp_path, State(number=1, host="host1", where=watch.NOT_STARTED))
    absent = watched("time.sleep(1000)", tmp_path, monkeypatch, elsewhere=True)
    assert absent.startswith("process 1 on host1 did not start: no progress for 1 s, while process 0")
    for number in range(2):
        (tmp_path / f"{STATE}{number}.json").unlink()
    monkeypatch.setattr(watch, "Activity", Busy)
    stopped = watched(STEPS_OF_A_STOPPED_SIDE, tmp_path, monkeypatch)
    assert "process PID is stopped (SIGSTOP, or a debugger), so it was ended" in stopped
    assert "after 0 steps" not in stopped
    (tmp_path / STEPS_PART).unlink()
    assert watched("time.sleep(2)", tmp_path, monkeypatch) == ""


@pytest.mark.slow
def test_what_a_process_has_started_is_seen_to_compute():
    process = start([sys.executable, "-ISc", "import os, sys\n" + FORK_THAT_COMPUTES])
    assert process.stdout.readline() == "waits\n"
    activity = Activity(process.pid)
    is_seen = any(time.sleep(LOOK_S) or activity.is_busy() for _ in range(30))
    processes.end_all(grace_s=0.0)
    process.communicate()
    assert is_seen
