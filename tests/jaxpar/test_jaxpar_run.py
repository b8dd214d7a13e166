"""`python -m jaxpar RUN_DIR` from outside: the record that it leaves, exit codes, and how it ends."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from compare.contract.record import (
    MANIFEST,
    STEPS_PART,
    Recorder,
    Step,
    read_failure,
)
from compare.contract.request import REQUEST, Request
from compare.contract.work import WORK
from compare.execute.launch import child_environment
from compare.side.ending import BAD_REQUEST
from compare.spec.engines.registry import SIDES
from compare.system.json_files import decode_json, write_json
from tests.support import processes, warm
from tests.support.processes import PATIENCE_S, wait_for


def start(folder: Path, request: Request, *arguments: str, **options) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    write_json(folder / REQUEST, request)
    environment = child_environment(SIDES["jaxpar"], request.platform)
    command = [warm.python(), "-m", "jaxpar", str(folder), *arguments]
    return processes.start(command, env=environment, **options)


def finish(folder: Path, request: Request) -> tuple[int, str]:
    process = start(folder, request)
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors


def test_wrong_side_is_rejected_in_one_line(tmp_path, tiny):
    returned, errors = finish(tmp_path, Request(engine="torch-manual", experiment=tiny))
    assert returned == BAD_REQUEST
    (line,) = errors.splitlines()
    assert line.startswith("jaxpar: ")
    assert "jaxpar runs jax-compiler, jax-explicit, jax-manual" in line
    failure = read_failure(tmp_path)
    assert failure is not None
    assert (failure.message, failure.exit_code) == (line.removeprefix("jaxpar: "), BAD_REQUEST)
    assert not (tmp_path / MANIFEST).exists()


@pytest.fixture
def endless(tiny, cache_dir) -> Request:
    experiment = replace(tiny, train=replace(tiny.train, max_iters=10**6))
    return Request(engine="jax-manual", experiment=experiment, cache_dir=cache_dir)


def test_signals_and_stdin_end_it_at_once(tmp_path, endless):
    signals = {"Ctrl-C": signal.SIGINT, "end of stdin": signal.SIGTERM, "SIGTERM": signal.SIGTERM}
    runs = {
        how: start(tmp_path / how, endless, "--exit-with-stdin", stdin=subprocess.PIPE) for how in signals
    }
    for how, process in runs.items():
        folder, part = tmp_path / how, tmp_path / how / STEPS_PART
        wait_for(lambda part=part: part.is_file() and os.path.getsize(part), process)
        if how == "end of stdin":
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(signals[how])
        assert process.wait(timeout=PATIENCE_S) == 128 + signals[how]
        assert process.stderr is not None
        failure = read_failure(folder)
        assert failure
        assert re.fullmatch(rf"ended by {signals[how].name} at step \d+", failure.message)
        errors = process.stderr.read()
        # JAX may warn before: another of these processes is writing the program that this one reads.
        assert errors.endswith(f"jaxpar: {failure.message}\n")
        assert "Traceback" not in errors
        assert not (folder / MANIFEST).exists()


def test_second_run_in_a_folder_is_rejected(tmp_path, endless):
    """Two runs start together: one clears the folder and runs. The other one changes no file."""
    Recorder(tmp_path).step(Step(step=7, loss=0.0, grad_norm=0.0, lr=0.0, step_time_ms=0.0))
    (tmp_path / "gradients.safetensors.1.2.tmp").write_bytes(b"half of it")
    runs = [start(tmp_path, endless) for _ in range(2)]
    wait_for(lambda: any(run.poll() is not None for run in runs))
    refused, running = sorted(runs, key=lambda run: run.returncode is None)
    assert refused.communicate()[1] == (
        f"jaxpar: {tmp_path} is in use by another run: wait for its end, or take another folder\n"
    )
    assert refused.returncode == 2
    part = tmp_path / STEPS_PART
    wait_for(lambda: part.is_file() and b'"step":1,' in part.read_bytes(), running)
    running.kill()
    running.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == [REQUEST, STEPS_PART, WORK]
    first, second, *_ = part.read_bytes().splitlines()
    assert [decode_json(line, Step).step for line in (first, second)] == [0, 1]
