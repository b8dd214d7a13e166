"""Forks instead of interpreters: what is asked for, said, signalled and killed is as of a real one."""

import json
import os
import signal

import processes
import psutil
import pytest
import warm
from processes import start, wait_for

PROGRAM = """
import json, os, signal, sys, time
def main():
    said = [sys.argv[1:], os.getcwd(), os.environ.get("SAID"), sys.stdin.read(), os.getpid()]
    print(json.dumps(said), flush=True)
    print("an error", file=sys.stderr)
    if "sleep" in sys.argv:
        time.sleep(1000)
    if "fail" in sys.argv:
        raise ValueError("no")
    return 7
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A package `asked`, whose server has begun; its warm command line."""
    python = warm.python()
    if python == warm.REAL:
        pytest.skip("forks with files and signals are Linux's")
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "__init__.py").touch()
    (tmp_path / "asked" / "__main__.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    folder = warm._folders[0]
    warm.start_server("asked", folder)
    wait_for((folder / "asked.json").exists)
    yield [python, "-m", "asked"]
    server = warm._servers.pop()
    server.kill()
    server.wait()
    for left in folder.glob("asked*"):
        left.unlink()


def test_it_gets_what_was_asked_and_says_what_it_says(program, tmp_path):
    environment = {**os.environ, "SAID": "aloud"}
    done = processes.run([*program, "a b", "c"], cwd=tmp_path, env=environment, stdin=open(os.devnull))  # noqa: SIM115
    assert done.returncode == 7
    *said, _ = json.loads(done.stdout)
    assert said == [["a b", "c"], str(tmp_path), "aloud", ""]
    assert done.stderr == "an error\n"
    failed = processes.run([*program, "fail"], stdin=open(os.devnull))  # noqa: SIM115
    assert failed.returncode == 1
    assert failed.stderr.endswith("ValueError: no\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_as_what_was_started_is_ended(program, number):
    process = start([*program, "sleep"], stdin=open(os.devnull))  # noqa: SIM115
    *_, pid = json.loads(process.stdout.readline())
    assert pid != process.pid  # a fork of the server
    wait_for(lambda: warm.program(process.pid).pid == pid)
    assert warm.program(os.getpid()).pid == os.getpid()  # no fork
    process.send_signal(number)
    assert process.wait() == -number
    wait_for(lambda: processes.has_ended(pid))
    process.communicate()


def test_what_is_read_at_an_import_needs_an_interpreter(program):
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "PYTHONPATH": os.pathsep.join(warm.sys.path)}
    command = [*program[:2], "timeit", "-n", "1", "-r", "1", "pass"]
    assert "loop" in processes.run(command).stdout  # no server has this module
    process = start([*program, "sleep"], env=environment, stdin=open(os.devnull))  # noqa: SIM115
    wait_for(lambda: psutil.Process(process.pid).cmdline()[:1] == [warm.REAL])
    process.kill()
    process.communicate()
