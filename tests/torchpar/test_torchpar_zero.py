"""ZeRO-1 to 3 and hybrid sharding of torch-manual end to end: against one device, in bytes, and with faults.

Sizes that do not divide by the ranks, and vectors with fewer elements than a shard is long.
"""

from pathlib import Path

import pytest
from forks import Done, run_torchpar
from layouts import TORCH_ZERO as LAYOUTS
from msgspec.structs import replace

from compare.contract.communication import summed
from compare.contract.record import Record, read_failure, read_record
from compare.contract.request import Request
from compare.judge.closed_forms.communication import communication
from compare.judge.ladder import climb
from compare.numerics.parameters import parameter_count
from compare.spec.experiment import Data, Experiment, Layout, Model, Optimizer, Precision, Train

PASSES = 2
EXPERIMENT = Experiment(
    model=Model(n_layer=2, n_head=4, n_embd=20, block_size=8, vocab_size=257, bias=True),
    data=Data(source="synthetic"),
    optimizer=Optimizer(warmup_iters=1, learning_rate=3e-3),
    train=Train(max_iters=4, batch_size=8, gradient_accumulation_steps=PASSES),
    precision=Precision(dtype="float64"),
)
SGD = replace(EXPERIMENT, optimizer=Optimizer(name="sgd", learning_rate=0.1, momentum=0.9, grad_clip=0.0))
SINGLE = replace(EXPERIMENT, precision=Precision(dtype="float32"))
BYTES = 8 * parameter_count(EXPERIMENT.model)


def torchpar(folder: Path, experiment: Experiment, *, fault: str = "") -> Done:
    return run_torchpar(
        folder,
        Request(engine="torch-manual", experiment=experiment, fault=fault, ladder=True, later_step=4),
    )


def run(folder: Path, experiment: Experiment, *, fault: str = "") -> Record:
    done = torchpar(folder, experiment, fault=fault)
    assert done.returncode == 0, done.stderr
    return read_record(folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, Record]:
    """One device, for each kind of experiment."""
    folder = tmp_path_factory.mktemp("one")
    kinds = {"adamw": EXPERIMENT, "sgd": SGD, "float32": SINGLE}
    return {name: run(folder / name, experiment) for name, experiment in kinds.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_device_and_is_really_sharded(name, references, tmp_path):
    layout = LAYOUTS[name]
    sharded = run(tmp_path / "run", replace(EXPERIMENT, layout=layout))
    verdict = climb(references["adamw"], sharded)
    assert verdict.passed, verdict.sentence()
    assert not verdict.skipped
    _check_resident(sharded, layout)
    _check_ledger(sharded, layout)


def _check_resident(sharded: Record, layout: Layout) -> None:
    resident = sharded.manifest.resident_bytes
    is_cut = {"parameters": layout.zero == 3, "gradients": layout.zero >= 2, "optimizer": True}
    for kind, cut in is_cut.items():
        whole = BYTES * (2 if kind == "optimizer" else 1)
        expected = whole / (layout.dp_shard if cut else 1)
        assert max(resident[kind]) == pytest.approx(expected, rel=0.05), kind
        if cut and kind != "optimizer":  # which has a step count for each parameter too
            assert sum(resident[kind]) == whole * layout.dp_replicate  # nothing padded


def _check_ledger(sharded: Record, layout: Layout) -> None:
    rows = summed(sharded.ledger.rows)
    found = {(row.kind, row.axis, row.purpose): row.bytes for row in rows}
    for item, size in communication("torch-manual", replace(EXPERIMENT, layout=layout)).items():
        off = 0.01 * (item[1] == "dp_replicate")  # shards that cannot all be equal
        assert found.pop(item) == pytest.approx(size, rel=off), item
    assert all(size <= 8 for size in found.values()), found  # the loss and the norm, nothing else


@pytest.mark.parametrize(
    ("name", "kind", "experiment"),
    [("zero1", "sgd", SGD), ("zero3", "sgd", SGD), ("zero2", "float32", SINGLE)],
)
def test_sgd_without_clipping_and_float32(name, kind, experiment, references, tmp_path):
    verdict = climb(references[kind], run(tmp_path / "run", replace(experiment, layout=LAYOUTS[name])))
    assert verdict.passed, verdict.sentence()


@pytest.mark.parametrize(
    ("name", "fault", "rung"),
    [
        ("hsdp", "norm_counts_replicas_twice", "grad_norm"),
        ("zero1", "wrong_optimizer_shard", "first_weights"),
        ("zero3", "wrong_optimizer_shard", "first_weights"),
        ("zero1", "overwritten_microbatch", "gradients"),
        ("zero3", "overwritten_microbatch", "gradients"),
    ],
)
def test_a_fault_shows_at_its_rung(name, fault, rung, references, tmp_path):
    faulty = run(tmp_path / "run", replace(EXPERIMENT, layout=LAYOUTS[name]), fault=fault)
    failure = climb(references["adamw"], faulty).failure
    assert failure is not None
    assert failure.rung == rung


@pytest.mark.parametrize(
    ("layout", "fault", "message"),
    [
        (
            Layout(dp_shard=2, zero=3),
            "norm_counts_replicas_twice",
            "no parameter is on two devices",
        ),
        (Layout(dp_replicate=2), "wrong_optimizer_shard", "give layout.zero = 1 or more"),
    ],
)
def test_a_fault_that_cannot_show_is_refused(layout, fault, message, tmp_path):
    done = torchpar(tmp_path / "run", replace(EXPERIMENT, layout=layout), fault=fault)
    assert done.returncode == 2
    failure = read_failure(tmp_path / "run")
    assert failure is not None
    assert message in failure.message
