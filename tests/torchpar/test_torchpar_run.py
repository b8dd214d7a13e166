"""`python -m torchpar RUN_DIR` end to end: both engines against one device, and faults that must show."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from bounds import assert_bounded
from msgspec.structs import replace
from warm import run_torchpar

from compare.contract.communication import summed
from compare.contract.record import read_failure, read_record, read_tensors
from compare.contract.request import Request, Rung
from compare.numerics.data import open_corpus
from compare.numerics.parameters import initial_parameters, parameter_count
from compare.spec.experiment import Data, Experiment, Layout, Model, Precision, Train

STEPS = 3
EXPERIMENT = Experiment(
    model=Model(n_layer=2, n_head=4, n_embd=32, block_size=16, bias=True),
    data=Data(source="synthetic"),
    train=Train(max_iters=STEPS, batch_size=4, gradient_accumulation_steps=2),
    precision=Precision(dtype="float64"),
)
TWO = Layout(dp_replicate=2, bucket_mb=0.05)
# Sums over half a batch in another order: 1e-15 seen on gradients, 1e-13 on weights after Adam's division.
TOLERANCE = 1e-11


def torchpar(folder: Path, **request) -> subprocess.CompletedProcess:
    values = {"experiment": EXPERIMENT, "ladder": True, "later_step": STEPS - 1, **request}
    return run_torchpar(folder, Request(**values))


def error(one: Path, other: Path, rung: Rung) -> float:
    a, b = read_tensors(one, rung), read_tensors(other, rung)
    assert a.keys() == b.keys()
    assert a
    smallest = np.finfo(np.float64).tiny  # biases start at zero
    return max(float(np.abs(a[name] - b[name]).max() / max(np.abs(a[name]).max(), smallest)) for name in a)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("torchpar") / "one"
    done = torchpar(folder, engine="torch-manual")
    assert done.returncode == 0, done.stderr
    return folder


def test_one_device_leaves_the_contracts_batch_and_weights(one_device):
    inputs_ABT, targets_ABT = open_corpus(EXPERIMENT).batch(EXPERIMENT, 0)
    batch = read_tensors(one_device, Rung.BATCH)
    np.testing.assert_array_equal(batch["inputs"], inputs_ABT)
    np.testing.assert_array_equal(batch["targets"], targets_ABT)
    weights = read_tensors(one_device, Rung.INITIAL_WEIGHTS)
    for name, array in initial_parameters(EXPERIMENT).items():
        np.testing.assert_array_equal(weights[name], array)
    assert read_record(one_device).ledger.rows == []


@pytest.mark.parametrize("engine", ["torch-manual", "torch-library"])
def test_two_replicas_equal_one_device(engine, one_device, tmp_path):
    done = torchpar(tmp_path / "two", engine=engine, experiment=replace(EXPERIMENT, layout=TWO))
    assert done.returncode == 0, done.stderr
    for rung in Rung:
        assert error(one_device, tmp_path / "two", rung) <= TOLERANCE, rung
    one, two = read_record(one_device), read_record(tmp_path / "two")
    np.testing.assert_allclose([s.loss for s in two.steps], [s.loss for s in one.steps], rtol=TOLERANCE)
    ledger = {(entry.kind, entry.purpose): entry for entry in summed(two.ledger.rows)}
    assert set(ledger) == {("all_reduce", "gradients"), ("all_reduce", "loss")}
    # Gradients once a step, whatever the accumulation; a scalar for the loss.
    assert ledger["all_reduce", "gradients"].bytes == parameter_count(EXPERIMENT.model) * 8
    assert (ledger["all_reduce", "loss"].calls, ledger["all_reduce", "loss"].bytes) == (1, 8)
    state = 4 * parameter_count(EXPERIMENT.model) * 8  # weights, gradients, two moments
    assert all(peak > state for peak in two.manifest.peak_memory_bytes)
    assert len(two.manifest.peak_memory_bytes) == 2
    assert_bounded(two)


def test_a_fault_shows_at_its_rung(one_device, tmp_path):
    experiment = replace(EXPERIMENT, layout=TWO)
    done = torchpar(tmp_path / "two", engine="torch-library", fault="sum_for_mean", experiment=experiment)
    assert done.returncode == 0, done.stderr
    red = [rung for rung in Rung if error(one_device, tmp_path / "two", rung) > TOLERANCE]
    assert red[0] == Rung.GRADIENTS


def test_what_cannot_work_is_one_line(tmp_path):
    done = torchpar(tmp_path / "run", engine="torch-manual", fault="gremlin")
    assert done.returncode == 2
    assert "torch-manual knows dropped_all_reduce" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    failure = read_failure(tmp_path / "run")
    assert failure is not None
    assert failure.message == done.stderr.strip()
