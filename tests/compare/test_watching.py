"""Hangs: a long compilation is none, a stopped or idle process and an endless step are."""

import sys

import processes
import pytest
from processes import start

from compare.contract.record import STEPS_PART
from compare.execute import watch

TIMEOUT_S = 2.0  # a busy machine may keep a process that computes from computing for a second
LONG_S = 1.5 * TIMEOUT_S  # of processor time

# What jaxpar's main thread does under its watchdog.
COMPUTE = f"begun = time.process_time()\nwhile time.process_time() - begun < {LONG_S}: pass\n"
WATCHED = f"""
import time
from jaxpar.watchdog import Watchdog
dog = Watchdog({TIMEOUT_S}, lambda line, stack: print(line, "| main" * ("<module>" in stack), flush=True))
"""


HANGS = "(timeout_s): the run hangs | main\n"


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        (COMPUTE, 0, ""),
        ("time.sleep(1000)", 1, f"no progress for 2 s and nothing computed {HANGS}"),
        ("dog.progress(in_step=True)\nwhile True: pass", 1, f"no progress for 2 s in a step {HANGS}"),
    ],
    ids=["compiles", "is idle", "is in an endless step"],
)
def test_jaxpars_watchdog(does, code, says):
    done = processes.run([sys.executable, "-c", WATCHED + does])
    assert (done.returncode, done.stdout) == (code, says), done.stderr


def watched(script: str, folder, monkeypatch, **options) -> str:
    """The harness's words on a process, which is ended then."""
    monkeypatch.setattr(watch, "GRACE_S", 0.0)
    process = start([sys.executable, "-c", "import os, signal, sys, time\n" + script, str(folder)])
    says = watch.watch(process, folder, timeout_s=TIMEOUT_S, on_step=lambda step: None, **options)
    processes.end_all(grace_s=0.0)
    process.communicate()
    return says.replace(str(process.pid), "PID")


# A rank that goes on while the process that watches it is stopped.
STEPS_OF_A_STOPPED_SIDE = f"""
if not os.fork():
    while True:
        with open(sys.argv[1] + "/{STEPS_PART}", "ab") as steps:
            steps.write(b'{{"step":0,"loss":1,"grad_norm":1,"lr":1,"step_time_ms":1}}\\n')
        time.sleep(0.1)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_the_harness_ends_what_is_stopped_or_idle_and_not_what_computes(tmp_path, monkeypatch):
    idle = watched("time.sleep(1000)", tmp_path, monkeypatch)
    assert idle == "no progress for 2 s after 0 steps: process PID computes nothing, so it was ended"
    assert (
        watched("time.sleep(4)", tmp_path, monkeypatch, elsewhere=True) == ""
    )  # on other hosts it may compute
    assert watched(f"if os.fork():\n    sys.exit(os.wait()[1])\n{COMPUTE}", tmp_path, monkeypatch) == ""
    stopped = watched(STEPS_OF_A_STOPPED_SIDE, tmp_path, monkeypatch)
    assert "process PID is stopped (SIGSTOP, or a debugger), so it was ended" in stopped
    assert "after 0 steps" not in stopped
