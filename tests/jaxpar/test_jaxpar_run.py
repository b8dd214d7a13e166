"""`python -m jaxpar RUN_DIR` from outside: the record that it leaves, exit codes, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes
import pytest
import warm
from bounds import assert_bounded
from msgspec.structs import replace
from processes import PATIENCE_S, wait_for

from compare.contract.communication import summed
from compare.contract.record import (
    ERROR,
    MANIFEST,
    STEPS_PART,
    Record,
    Recorder,
    Step,
    read_failure,
    read_record,
    read_tensors,
)
from compare.contract.request import REQUEST, Request, Rung
from compare.contract.work import WORK
from compare.execute.launch import child_environment
from compare.host.json_files import decode_json, write_json
from compare.judge.strategy import strategy_of
from compare.numerics.data import open_corpus
from compare.numerics.parameters import initial_parameters, parameter_count, parameter_table
from compare.spec.engines.registry import SIDES
from compare.spec.experiment import Experiment, Layout, Optimizer, Train


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


def sharded(experiment: Experiment, **layout) -> Experiment:
    return replace(experiment, layout=Layout(**layout))


@pytest.fixture
def longer(tiny: Experiment) -> Experiment:
    train = Train(max_iters=5, batch_size=4, gradient_accumulation_steps=2)
    return replace(tiny, train=train, optimizer=Optimizer(warmup_iters=0))


def trained(folder: Path, request: Request) -> Record:
    code, errors = finish(folder, request)
    assert (code, errors) == (0, "")
    return read_record(folder)


def assert_close(one: Path, other: Path, rung: Rung, *, tolerance: float) -> None:
    """Every tensor within `tolerance` of the largest value in it."""
    expected, actual = read_tensors(one, rung), read_tensors(other, rung)
    assert expected
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        limit = tolerance * np.abs(tensor).max()
        np.testing.assert_allclose(actual[name], tensor, rtol=0, atol=limit, err_msg=f"{rung} {name}")


def test_record_of_four_devices_against_one(tmp_path, cache_dir, longer):
    one, four = tmp_path / "one", tmp_path / "four"
    request = Request(
        engine="jax-compiler", experiment=longer, ladder=True, later_step=4, cache_dir=cache_dir
    )
    reference = trained(one, request)
    record = trained(
        four,
        replace(
            request,
            engine="jax-manual",
            experiment=sharded(longer, dp_replicate=4, gradient_sync="bucketed", bucket_mb=0.02),
        ),
    )

    inputs_ABT, targets_ABT = open_corpus(longer).batch(longer, 0)
    batch = read_tensors(four, Rung.BATCH)
    np.testing.assert_array_equal(batch["inputs"], inputs_ABT)
    np.testing.assert_array_equal(batch["targets"], targets_ABT)
    for name, weight in initial_parameters(longer).items():
        np.testing.assert_array_equal(read_tensors(four, Rung.INITIAL_WEIGHTS)[name], weight)
    # Measured 1e-15, and 1e-13 for weights: Adam's first step divides by gradients of about 1e-8.
    for rung, tolerance in {
        Rung.GRADIENTS: 1e-13,
        Rung.FIRST_M: 1e-13,
        Rung.FIRST_V: 1e-13,
        Rung.FIRST_WEIGHTS: 1e-11,
        Rung.LATER_WEIGHTS: 1e-11,
    }.items():
        assert_close(one, four, rung, tolerance=tolerance)
        assert list(read_tensors(four, rung)) == sorted(p.name for p in parameter_table(longer.model))
    assert [s.step for s in record.steps] == list(range(5))
    for step, expected in zip(record.steps, reference.steps, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=1e-12)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
        assert step.step_time_ms > 0
    assert record.steps[-1].loss < record.steps[0].loss

    assert reference.ledger.rows == []
    gradients, loss = summed(record.ledger.rows)
    assert (gradients.purpose, gradients.bytes) == ("gradients", 8 * parameter_count(longer.model))
    assert (loss.purpose, loss.calls) == ("loss", 1)
    assert strategy_of(record).objections == []
    assert len(record.manifest.peak_memory_bytes) == record.manifest.devices == 4
    assert_bounded(record)
    assert record.manifest.peak_memory_bytes[0] > 3 * 8 * parameter_count(longer.model)  # weights, m, v


REFUSED = {
    "overlapped": ({"layout": Layout(dp_replicate=2, gradient_sync="overlapped")}, {}, 2, "overlapped"),
    "overlapped, of shards": (
        {"layout": Layout(dp_replicate=2, dp_shard=2, zero=3, gradient_sync="overlapped")},
        {},
        2,
        "jax-manual offers naive, flat, bucketed",
    ),
    "indivisible": ({"layout": Layout(dp_replicate=3)}, {}, 2, "not divisible by layout.dp_replicate = 3"),
    "another side": ({}, {"engine": "torch-manual"}, 2, "torch-manual"),
    "no such fault": ({}, {"fault": "typo"}, 2, "typo"),
    "compiler's reduction": ({}, {"fault": "sum_for_mean", "engine": "jax-compiler"}, 2, "jax-compiler"),
    "nothing to drop": ({}, {"fault": "dropped_all_reduce"}, 2, "give layout.dp_replicate = 2 or more"),
    "no tp": ({}, {"fault": "doubled_row_bias"}, 2, "give layout.tp = 2 or more"),
    "no GPU": ({}, {"platform": "gpu"}, 3, "needs 1 gpu devices and JAX finds 0"),
}


@pytest.mark.parametrize(("spec", "request_", "code", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals_are_one_line(tmp_path, tiny, spec, request_, code, says):
    if request_.get("platform") == "gpu":
        doctor = processes.run([sys.executable, "-m", "jaxpar", "--doctor"])
        if json.loads(doctor.stdout)["gpus"]:
            pytest.skip("this machine has a GPU")
    request = Request(**{"engine": "jax-manual", "experiment": replace(tiny, **spec), **request_})
    returned, errors = finish(tmp_path, request)
    assert returned == code
    (line,) = errors.splitlines()
    assert line.startswith("jaxpar: ")
    assert says in line
    failure = read_failure(tmp_path)
    assert failure is not None
    assert failure.message == line.removeprefix("jaxpar: ")
    assert not (tmp_path / MANIFEST).exists()


ENDINGS = {"Ctrl-C": "", "end of stdin": "", "SIGTERM": "jaxpar: ended by SIGTERM\n"}


@pytest.mark.parametrize("how", ENDINGS)
def test_it_ends_at_once(tmp_path, cache_dir, tiny, how):
    endless = replace(tiny, train=replace(tiny.train, max_iters=10**6))
    request = Request(engine="jax-compiler", experiment=endless, cache_dir=cache_dir)
    process = start(tmp_path, request, "--exit-with-stdin", stdin=subprocess.PIPE)
    part = tmp_path / STEPS_PART
    wait_for(lambda: part.is_file() and os.path.getsize(part), process)
    if how == "end of stdin":
        assert process.stdin is not None
        process.stdin.close()
    else:
        process.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) != 0
    assert process.stderr is not None
    assert process.stderr.read() == ENDINGS[how]
    assert (tmp_path / ERROR).is_file() == (how == "SIGTERM")
    assert not (tmp_path / MANIFEST).exists()


def test_a_second_run_in_a_folder_is_refused_and_what_a_killed_one_left_is_cleared(tmp_path, cache_dir, tiny):
    """Two that start at once: one runs, and its record is its own; the other one touches nothing."""
    Recorder(tmp_path).step(Step(step=7, loss=0.0, grad_norm=0.0, lr=0.0, step_time_ms=0.0))
    (tmp_path / "gradients.safetensors.1.2.tmp").write_bytes(b"half of it")
    endless = replace(tiny, train=replace(tiny.train, max_iters=10**6))
    request = Request(engine="jax-manual", experiment=endless, cache_dir=cache_dir)
    runs = [start(tmp_path, request) for _ in range(2)]
    wait_for(lambda: any(run.poll() is not None for run in runs))
    runs.sort(key=lambda run: run.returncode is None)
    refused, running = runs
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


def test_doctor():
    done = processes.run([sys.executable, "-m", "jaxpar", "--doctor"])
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert {"python", "jax", "flax", "optax"} <= set(found["versions"])
    assert "virtual devices" in found["cpu_devices"]
    assert isinstance(found["gpus"], list)
