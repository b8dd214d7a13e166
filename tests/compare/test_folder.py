"""The folder of a run: one run at a time, nothing half written, a full disk said in words."""

import errno
import sys
from pathlib import Path

import processes
import pytest
from warm import run_torchpar

from compare.contract.record import STEPS_PART, Recorder, Step, read_failure
from compare.contract.request import REQUEST, Request
from compare.contract.run_lock import lock_folder
from compare.host.disk import DiskFull, full_disk_named, no_room, remove_leftovers, write_atomically
from compare.host.json_files import write_json
from compare.host.signals import describe_exit
from compare.spec.experiment import ExperimentError

STEP = Step(step=0, loss=0.0, grad_norm=0.0, lr=0.0, step_time_ms=0.0)


def test_a_killed_holder_lets_go_and_what_it_started_does_not_hold(tmp_path):
    script = (
        "import subprocess, sys, time; from pathlib import Path;"
        "from compare.contract.run_lock import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])):\n"
        "    quiet = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL)\n"
        "    subprocess.Popen(['sleep', '1000'], **quiet)\n"
        "    print('held', flush=True); time.sleep(1000)"
    )
    holder = processes.start([sys.executable, "-c", script, str(tmp_path)])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ExperimentError, match="is in use by another run"), lock_folder(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with lock_folder(tmp_path):
        pass
    processes.end_all(grace_s=0.0)


def test_a_folder_that_cannot_be_locked_is_said(tmp_path, monkeypatch, capsys):
    with pytest.raises(ExperimentError, match=r"missing: No such file or directory: "):
        lock_folder(tmp_path / "missing").__enter__()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # NFS

    monkeypatch.setattr("fcntl.flock", refuse)
    with lock_folder(tmp_path):
        pass
    assert "has no locks (Bad file descriptor): do not start a second run in it" in capsys.readouterr().err


@pytest.mark.slow
def test_torchpar_touches_nothing_in_a_folder_that_is_in_use(tmp_path, tiny):
    folder = tmp_path / "run"
    folder.mkdir()
    with lock_folder(folder):
        done = run_torchpar(folder, Request(engine="torch-manual", experiment=tiny))
    assert done.returncode == 2
    assert done.stderr == f"{folder} is in use by another run: wait for its end, or take another folder\n"
    assert [path.name for path in folder.iterdir()] == [REQUEST]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(
        DiskFull, match=rf"^{tmp_path}: no space left on the device: make room, and run again$"
    ):
        write_atomically(tmp_path / "weights", b"all of them")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_named_while_steps_are_appended(tmp_path):
    (tmp_path / STEPS_PART).symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=rf"^{tmp_path}: no space left on the device"):
        Recorder(tmp_path).step(STEP)
    with pytest.raises(FileNotFoundError), full_disk_named(tmp_path):
        (tmp_path / "missing").read_bytes()  # what else may be wrong stays as it is
    assert no_room(OSError(errno.EDQUOT, "Quota exceeded"), tmp_path).startswith(
        f"{tmp_path}: the disk quota"
    )


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    for name in ("a.json.1.2.tmp", STEPS_PART, REQUEST):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [REQUEST, STEPS_PART]


@pytest.mark.slow
def test_a_side_that_may_write_no_more_says_so_in_a_line(tmp_path, tiny):
    """A limit on the size of files, which needs no privilege: the same as a full disk otherwise."""
    write_json(tmp_path / REQUEST, Request(engine="jax-manual", experiment=tiny, ladder=True))
    limited = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]  # blocks of 512 bytes
    done = processes.run([*limited, sys.executable, "-m", "jaxpar", str(tmp_path)])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"jaxpar: {tmp_path}: a file would be larger than this process may write")
    failure = read_failure(tmp_path)
    assert failure is not None
    assert f"jaxpar: {failure.message}" == line
    assert not list(tmp_path.glob("*.tmp"))


def test_how_a_process_ended():
    for code, says in {
        -9: "killed by SIGKILL at step 3 (out of memory, if nobody sent it)",
        143: "ended by SIGTERM at step 3",
        7: "left with exit code 7 at step 3",
    }.items():
        assert describe_exit(code, when="at step 3") == says
