"""Profiled and silent runs: spans in the order of the schedule, collectives as the ledger counts them."""

from collections import Counter
from pathlib import Path

import pytest
from forks import run_torchpar
from msgspec.structs import replace

from compare.contract.record import Record, read_record
from compare.contract.request import Request, Rung
from compare.contract.timeline import COMPUTE
from compare.pipeline.schedules import Kind, make_schedule
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Data, Experiment, ExperimentError, Layout, Model, Precision, Train

STEPS, MICROBATCHES = 5, 4
ENGINES_OF_TORCH = ("torch-manual", "torch-library", "torch-compiler")
EXPERIMENT = Experiment(
    model=Model(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=True),
    data=Data(source="synthetic"),
    train=Train(max_iters=STEPS, batch_size=4),
    precision=Precision(dtype="float32"),
)
KINDS = {Kind.FORWARD: "forward"}


def ran(folder: Path, engine: str, layout: Layout, **fields) -> Record:
    request = Request(engine=engine, experiment=replace(EXPERIMENT, layout=layout), **fields)
    done = run_torchpar(folder, request)
    assert done.returncode == 0, done.stderr
    return read_record(folder)


@pytest.mark.parametrize(
    ("engine", "schedule"),
    [("torch-manual", "1f1b"), ("torch-library", "1f1b"), ("torch-manual", "zero_bubble")],
)
def test_microbatches_come_in_the_order_of_the_schedule(engine, schedule, tmp_path):
    layout = Layout(pp=2, schedule=schedule, microbatches=MICROBATCHES)
    record = ran(tmp_path / "run", engine, layout, profile=True)
    timeline = record.timeline
    assert timeline is not None
    assert (timeline.step, len(timeline.lanes)) == (3, 2)
    for rank, tasks in enumerate(make_schedule(schedule, ranks=2, microbatches=MICROBATCHES)):
        spans = [s for s in timeline.lanes[rank].spans if s.microbatch >= 0 and s.kind in COMPUTE]
        found = [(s.kind, s.microbatch) for s in spans if not s.name.startswith("loss")]
        assert found == [(KINDS.get(task.kind, "backward"), task.microbatch) for task in tasks]
        halves = [s.name.split()[0] for s in spans if s.kind == "backward"]
        wanted = {Kind.BACKWARD: "backward", Kind.BACKWARD_INPUT: "input", Kind.BACKWARD_WEIGHT: "weight"}
        assert halves == [wanted[task.kind] for task in tasks if task.kind != Kind.FORWARD]
        assert any(s.kind == "update" for s in timeline.lanes[rank].spans)
        assert {s.axis for s in timeline.lanes[rank].spans if s.kind == "communication"} == {"pp"}
    ends = {(lane.device, s.kind, s.microbatch): s for lane in timeline.lanes for s in lane.spans}
    for microbatch in range(MICROBATCHES):  # one clock: no stage begins before the other has ended
        assert ends[0, "forward", microbatch].end_us <= ends[1, "forward", microbatch].begin_us
    begins = [s.begin_us for lane in timeline.lanes for s in lane.spans]
    assert min(begins) == 0
    assert max(s.end_us for lane in timeline.lanes for s in lane.spans) <= 2 * timeline.wall_us


@pytest.mark.parametrize("engine", ENGINES_OF_TORCH)
@pytest.mark.parametrize(
    "layout", [Layout(dp_replicate=2, bucket_mb=0.05), Layout(dp_shard=2, zero=3)], ids=["ddp", "fsdp"]
)
def test_there_are_as_many_collectives_as_the_ledger_counts(engine, layout, tmp_path):
    record = ran(tmp_path / "run", engine, layout, profile=True)
    assert record.timeline is not None
    counted: Counter[tuple[str, str, str]] = Counter()
    for row in record.ledger.rows:
        counted[row.kind, row.axis, row.purpose] += row.calls
    assert max(counted.values()) > 1  # buckets, units
    for lane in record.timeline.lanes:
        sent = [s for s in lane.spans if s.kind == "communication"]
        assert Counter((s.operation, s.axis, s.purpose) for s in sent) == counted
        names = {s.kind for s in lane.spans}
        assert names == {"forward", "backward", "update", "communication"}
    assert [step.step for step in record.steps if step.instrumented] == [2, 3]


@pytest.mark.parametrize(
    "layout", [Layout(dp_replicate=2, bucket_mb=0.05), Layout(pp=2, microbatches=2)], ids=["ddp", "pp"]
)
def test_a_silent_twin_runs_to_its_end_and_leaves_its_time_alone(layout, tmp_path):
    real = ran(tmp_path / "real", "torch-manual", layout)
    for engine in (name for name in ENGINES_OF_TORCH if layout.pp == 1 or ENGINES[name].layouts.schedules):
        twin = ran(tmp_path / engine, engine, layout, silent=True)
        assert len(twin.steps) == STEPS
        # The first step still communicates; then each rank goes on alone, or with what it never received.
        assert twin.steps[0].loss == pytest.approx(real.steps[0].loss, rel=1e-5)
        assert twin.steps[-1].loss != pytest.approx(real.steps[-1].loss, rel=1e-4)
        assert twin.timeline is None
        assert not [rung for rung in Rung if (tmp_path / engine / f"{rung}.safetensors").exists()]
        assert all(step.step_time_ms > 0 for step in twin.steps)


@pytest.mark.parametrize(
    ("engine", "fields", "says"),
    [
        ("torch-manual", {"silent": True, "ladder": True}, "without ladder"),
        ("nanogpt-loop", {"profile": True}, "nanogpt-loop leaves no timeline"),
        ("nanogpt-loop", {"silent": True}, "nanogpt-loop has no silent twin"),
    ],
)
def test_what_has_no_timeline_or_twin_is_refused(engine, fields, says, tmp_path):
    done = run_torchpar(tmp_path / "run", Request(engine=engine, experiment=EXPERIMENT, **fields))
    assert done.returncode == 2
    assert says in done.stderr


def test_jax_says_why_it_has_no_twin():
    with pytest.raises(ExperimentError, match="an operation of XLA's program"):
        ENGINES["jax-manual"].require_watchable(profile=True, silent=True)
