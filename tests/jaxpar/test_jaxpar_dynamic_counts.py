"""The ledger says how often each collective runs, the profiler how often it ran, and what was done when.

The oracles are of different kinds: the ledger is read from the text of a program, the profile is of its run,
the order of a pipeline is the schedule's.
"""

import re
from functools import cache

import pytest
from dynamic_counts import Counted, dynamic_counts
from msgspec.structs import replace
from watched_steps import EXPERIMENT, watch

from compare.contract.record import clear_record, read_record
from compare.contract.request import Request
from compare.contract.timeline import COMPUTE, TRACES, busy_us, exposed_us, idle_us
from compare.spec.experiment import Layout, Train
from jaxpar.measure.profile import Execution, make_timeline
from jaxpar.train import train

LAYOUTS = {
    "ddp": Layout(dp_replicate=4),
    "fsdp_tp_sp": Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True),
    "fsdp_pp": Layout(pp=2, dp_shard=2, zero=3, schedule="gpipe", microbatches=2),
    "interleaved": Layout(pp=2, schedule="interleaved", chunks=2, microbatches=2),
    "tp_pp": Layout(pp=2, tp=2, schedule="1f1b", microbatches=2),
}
CASES = [("jax-compiler", "fsdp_pp")]
CASES += [("jax-manual", name) for name in ("ddp", "fsdp_tp_sp", "interleaved", "tp_pp")]


@cache
def ran(engine: str, name: str) -> tuple[list[Execution], str]:
    return watch(engine, replace(EXPERIMENT, layout=LAYOUTS[name]))


def counted(engine: str, name: str, *, edit=lambda hlo: hlo) -> list[Counted]:
    events, hlo = ran(engine, name)
    return dynamic_counts(events, edit(hlo), LAYOUTS[name].axes)


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_collectives_run_as_often_as_the_ledger_says_and_lanes_have_them_all(engine, name):
    rows = counted(engine, name)
    assert rows
    assert [(row.static, row.differences) for row in rows] == [(row.dynamic, []) for row in rows]
    timeline = make_timeline(*ran(engine, name), LAYOUTS[name].axes, step=1)
    for lane in timeline.lanes:
        assert {span.kind for span in lane.spans} == {*COMPUTE, "communication"}
        assert [span.begin_us for span in lane.spans] == sorted(span.begin_us for span in lane.spans)
        assert max(span.end_us for span in lane.spans) <= timeline.wall_us + 1e-3
        for row in rows:
            key = row.kind, row.axis, row.purpose
            spans = [span for span in lane.spans if (span.operation, span.axis, span.purpose) == key]
            assert len(spans) == row.dynamic[lane.device], key
        assert 0 < exposed_us(lane) <= busy_us(lane, "communication") + 1e-3
        assert busy_us(lane, "communication") + idle_us(lane, timeline.wall_us) < timeline.wall_us


def test_what_one_end_of_a_pipeline_does_is_counted_there_alone():
    """The loss is the last stage's: its reductions over tp are the devices 2 and 3's."""
    rows = counted("jax-manual", "tp_pp")
    (of_loss,) = [row.dynamic for row in rows if (row.axis, row.purpose) == ("tp", "loss")]
    assert of_loss[:2] == [0, 0]
    assert of_loss[2] == of_loss[3] > 0


def test_a_wrong_trip_count_is_noticed():
    """Doctored in the text that the ledger is read from: one loop would turn once more than it did."""
    engine, name = "jax-manual", "fsdp_tp_sp"
    trips = r'("known_trip_count":\{"n":")(\d+)'
    hlo = ran(engine, name)[1]
    wrong = 0
    for place in re.finditer(trips, hlo):

        def doctored(hlo: str, place: re.Match[str] = place) -> str:
            return hlo[: place.start(2)] + str(int(place[2]) + 1) + hlo[place.end(2) :]

        wrong += any(row.differences for row in counted(engine, name, edit=doctored))
    assert wrong >= 2  # the loops with a collective in them


def test_a_collective_that_did_not_run_is_noticed():
    events, hlo = ran("jax-manual", "ddp")
    reduce = next(event for event in events if "psum" in event.name)
    others = [event for event in events if event.name != reduce.name]
    rows = dynamic_counts(others, hlo, LAYOUTS["ddp"].axes)
    expected = f"{reduce.name}: {[0] * 4} times, and not {[1] * 4}"
    assert [line for row in rows for line in row.differences] == [expected]


def test_a_profiled_run_leaves_the_timeline_of_its_last_step_if_it_is_short(tmp_path):
    experiment = replace(EXPERIMENT, train=Train(max_iters=2, batch_size=2), layout=Layout(dp_replicate=2))
    train(Request(engine="jax-manual", experiment=experiment, profile=True), tmp_path)
    record = read_record(tmp_path, requested=False)
    assert record.timeline is not None
    assert record.timeline.step == 1
    assert [lane.device for lane in record.timeline.lanes] == [0, 1]
    assert [step.instrumented for step in record.steps] == [False, True]
    assert record.timeline.wall_us <= 1e3 * record.steps[1].step_time_ms
    assert (tmp_path / "timeline.json").is_file()
    assert not any(path.is_dir() for path in tmp_path.iterdir())  # the profiler's own folder is gone
    assert set(TRACES) <= {path.name for path in tmp_path.iterdir()}
    clear_record(tmp_path)
    assert not list(tmp_path.iterdir())
