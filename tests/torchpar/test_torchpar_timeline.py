"""Profiled runs: spans in the order of the schedule, collectives as in the ledger."""

from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from compare.contract.record import Record
from compare.contract.request import Request
from compare.contract.timeline import COMPUTE
from compare.pipeline.schedules import Kind, make_schedule
from compare.spec.experiment import Data, Experiment, Layout, Model, Precision, Train
from tests.support.warm import run_torchpar

STEPS, MICROBATCHES = 5, 4
EXPERIMENT = Experiment(
    model=Model(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=True),
    data=Data(source="synthetic"),
    train=Train(max_iters=STEPS, batch_size=4),
    precision=Precision(dtype="float32"),
)
KINDS = {Kind.FORWARD: "forward"}


def run_engine(folder: Path, engine: str, layout: Layout, **fields) -> Record:
    return run_torchpar(
        folder, Request(engine=engine, experiment=replace(EXPERIMENT, layout=layout), **fields)
    )


@pytest.mark.parametrize(
    ("engine", "schedule"),
    [("torch-library", "1f1b"), ("torch-manual", "zero_bubble")],
)
def test_timeline_follows_the_schedule(engine, schedule, tmp_path):
    layout = Layout(pp=2, schedule=schedule, microbatches=MICROBATCHES)
    record = run_engine(tmp_path / "run", engine, layout, profile=True)
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
    for microbatch in range(MICROBATCHES):  # one clock: a stage begins after the stage before
        assert ends[0, "forward", microbatch].end_us <= ends[1, "forward", microbatch].begin_us
    begins = [s.begin_us for lane in timeline.lanes for s in lane.spans]
    assert min(begins) == 0
    assert max(s.end_us for lane in timeline.lanes for s in lane.spans) <= 2 * timeline.wall_us


DDP, FSDP = Layout(dp_replicate=2, bucket_mb=0.05), Layout(dp_shard=2, zero=3)


@pytest.mark.parametrize(("engine", "layout"), [("torch-manual", FSDP), ("torch-library", DDP)])
def test_timeline_collectives_match_ledger(engine, layout, tmp_path):
    record = run_engine(tmp_path / "run", engine, layout, profile=True)
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
