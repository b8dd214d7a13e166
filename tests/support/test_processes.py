"""The check that no test leaves a process: it finds what hides, and fails aloud."""

import sys

import processes
import psutil
import pytest
from processes import end_all, left_behind, start, wait_for

SLEEPER = "import time; time.sleep(1000)"
# In a session of its own, its parent gone.
ORPHAN = f"import os; os.fork() and os._exit(0); os.setsid(); {SLEEPER}"


def test_an_orphan_is_found_and_ended():
    start([sys.executable, "-c", ORPHAN]).wait()
    wait_for(lambda: len(left_behind()) == 1)
    (orphan,) = left_behind()
    assert orphan.ppid() != psutil.Process().pid
    (line,) = end_all(grace_s=0.0)
    assert line.startswith(f"{orphan.pid}: ")
    assert not orphan.is_running()


@pytest.mark.parametrize("passed", [True, False])
def test_a_test_that_leaves_one_fails(passed, request, monkeypatch):
    """The fixture itself, at the end of a test that left a process: what failed already is not told twice."""
    monkeypatch.setattr(processes, "GONE_S", 0.5)
    ending = processes.no_process_left(request)
    next(ending)
    start([sys.executable, "-c", SLEEPER])
    wait_for(lambda: len(left_behind()) == 1)
    request.node.stash[processes.FAILED] = not passed
    if passed:
        with pytest.raises(pytest.fail.Exception, match="left behind, and now ended: "):
            next(ending)
    else:
        with pytest.raises(StopIteration):
            next(ending)
    assert left_behind() == []
    request.node.stash[processes.FAILED] = False


def test_children_hear_ctrl_c_though_pytest_may_not():
    """As in `nohup make test &`: what a test starts behaves as in a terminal."""
    show = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    assert processes.run([*ignoring, sys.executable, "-c", show]).stdout == "False\n"
    nested = [*ignoring, sys.executable, "-ISc", processes.PRELUDE, sys.executable, "-c", show]
    assert processes.run(nested).stdout == "True\n"
