"""The folder of a run: one run at a time, no partial file, the message of a full disk."""

import errno
import sys
from pathlib import Path

import pytest

from compare.checkpoint.description import CHECKPOINTS, UNFINISHED
from compare.contract.record import STATE, STEPS_PART, read_failure, remove_remains
from compare.contract.request import REQUEST, Request
from compare.side.run_lock import lock_folder
from compare.spec.experiment import ExperimentError
from compare.system.disk import no_room, write_atomically
from compare.system.json_files import write_json
from tests.support import processes


def test_lock_ends_with_its_holder(tmp_path):
    script = (
        "import subprocess, sys, time; from pathlib import Path;"
        "from compare.side.run_lock import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])):\n"
        "    quiet = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL)\n"
        "    subprocess.Popen(['sleep', '1000'], **quiet)\n"
        "    print('locked', flush=True); time.sleep(1000)"
    )
    holder = processes.start([sys.executable, "-c", script, str(tmp_path)])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(ExperimentError, match="is in use by another run"), lock_folder(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with lock_folder(tmp_path):
        pass
    processes.end_all(grace_s=0.0)


def test_missing_locks_are_reported(tmp_path, monkeypatch, capsys):
    with pytest.raises(ExperimentError, match=r"missing: No such file or directory: "):
        lock_folder(tmp_path / "missing").__enter__()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # NFS

    monkeypatch.setattr("fcntl.flock", refuse)
    with lock_folder(tmp_path):
        pass
    assert "has no locks (Bad file descriptor): do not start a second run in it" in capsys.readouterr().err


def test_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(tmp_path / "weights", b"all of them")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, ""), "FOLDER: No space left on device: make room, and run again"),
        (OSError(errno.EDQUOT, "", "weights"), "weights: Disk quota exceeded: make room, and run again"),
        (FileNotFoundError(errno.ENOENT, "missing"), ""),
    ],
    ids=["full", "quota", "other error"],
)
def test_full_disk_names_its_file(error, message, tmp_path):
    assert no_room(error, tmp_path) == message.replace("FOLDER", str(tmp_path))


def test_only_remains_are_removed(tmp_path):
    unfinished = tmp_path / CHECKPOINTS / f"step-00000001{UNFINISHED}"
    unfinished.mkdir(parents=True)
    state = f"{STATE}0.json.1.2.tmp"
    for path in ("a.json.1.2.tmp", state, STEPS_PART, REQUEST, unfinished / "device-00000-0.safetensors"):
        (tmp_path / path).write_text("")
    remove_remains(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINTS, state, REQUEST, STEPS_PART]
    remove_remains(tmp_path, of_states=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINTS, REQUEST, STEPS_PART]
    assert not list((tmp_path / CHECKPOINTS).iterdir())


@pytest.mark.slow
def test_full_disk_ends_a_side_with_one_line(tmp_path, tiny):
    """A limit on the size of files, which needs no privilege, stands in for a full disk."""
    write_json(tmp_path / REQUEST, Request(engine="jax-manual", experiment=tiny, ladder=True))
    limited = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]  # blocks of 512 bytes
    done = processes.run([*limited, sys.executable, "-m", "jaxpar", str(tmp_path)])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"jaxpar: {tmp_path}/initial_weights.safetensors: File too large: make room")
    failure = read_failure(tmp_path)
    assert failure is not None
    assert f"jaxpar: {failure.message}" == line
    assert not list(tmp_path.glob("*.tmp"))
