"""The observed work of a traced step: right steps have no objection, a step of another layout has one."""

import pytest
from msgspec.structs import replace

from compare.judge.strategy import strategy_of
from compare.spec.experiment import Experiment, Layout, edited
from jaxpar.measure.work import work_of
from jaxpar.programs import trace_train
from tests.support.jax_steps import engine_and_state, experiment_of
from tests.support.records import make_record

GPIPE = Layout(pp=2, schedule="gpipe", microbatches=4)
INTERLEAVED = Layout(pp=2, schedule="interleaved", chunks=2, microbatches=2)
FULL, DOTS = Layout(dp_replicate=2, remat="full"), Layout(dp_shard=2, zero=3)
"""A scan keeps dots by default."""
IN_PARTS = {"train": {"loss_chunks": 2}}
ENGINES = ("jax-compiler", "jax-explicit", "jax-manual")
CASES = [
    *((engine, FULL, {}, {}, "") for engine in ENGINES),
    *((engine, DOTS, IN_PARTS, {}, "") for engine in ENGINES),
    *((engine, layout, {}, {}, "") for engine in ENGINES for layout in (GPIPE, INTERLEAVED)),
    ("jax-manual", Layout(pp=2, microbatches=2, remat="full"), {}, {}, ""),
    *(
        (engine, GPIPE, {}, {"microbatches": 2}, "blocks that forward runs = 18 was asked for")
        for engine in ENGINES[:2]
    ),
    *(
        (engine, INTERLEAVED, {}, {"schedule": "gpipe", "chunks": 1}, "blocks that forward runs")
        for engine in ENGINES[:2]
    ),
]


@pytest.mark.parametrize(("engine", "layout", "fields", "done", "says"), CASES)
def test_work_of_a_traced_step(tmp_path, engine, layout, fields, done, says):
    """Traced, and not compiled."""
    asked = edited(experiment_of(layout), fields)
    work = traced_work(engine, edited(asked, {"layout": done}))
    (tmp_path / "run").mkdir()
    record = make_record(tmp_path / "run" / engine, asked, engine=engine, tensors={}, ladder=False)
    objections = [*strategy_of(replace(record, work=work)).objections.values()]
    assert bool(objections) == bool(says), objections
    assert says in "; ".join(objections)


def traced_work(name: str, experiment: Experiment):
    engine, state = engine_and_state(name, experiment)
    return work_of(trace_train(engine, state).jaxpr, engine.ticks)
