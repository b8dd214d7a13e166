"""The work of a traced step: of engines that do as they were asked, and of those that do half of it."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import jax
import pytest
from msgspec.structs import replace

from compare.judge.strategy import strategy_of
from compare.spec.experiment import Experiment, Layout, edited
from jaxpar import model
from jaxpar.measure.work import work_of
from jaxpar.programs import trace_train
from tests.support.jax_steps import engine_and_state, experiment_of
from tests.support.records import make_record

GPIPE = Layout(pp=2, schedule="gpipe", microbatches=4)
INTERLEAVED = Layout(pp=2, schedule="interleaved", chunks=2, microbatches=2)
FULL, DOTS = Layout(dp_replicate=2, remat="full"), Layout(dp_shard=2, zero=3)
"""dots is what a scan does by itself."""
IN_PARTS = {"train": {"loss_chunks": 2}}
ENGINES = ("jax-compiler", "jax-explicit", "jax-manual")


def half_the_layers_again() -> AbstractContextManager:
    """A scan over some of the blocks recomputes them, and another one does not."""
    right = model.GPT.layers

    def layers(self, x_BTC, keys_B2=None, first=0):
        graph, blocks = model.nnx.split(self.blocks)
        halves = (jax.tree.map(lambda w, part=part: w[part], blocks) for part in (slice(2), slice(2, None)))
        for remat, half in zip(("none", "full"), halves, strict=True):
            self.hooks = dataclasses.replace(self.hooks, remat=remat)
            self.blocks = model.nnx.merge(graph, half)
            x_BTC, routing = right(self, x_BTC, keys_B2, first)
        return x_BTC, routing

    return patch.object(model.GPT, "layers", layers)


def kept_logits() -> AbstractContextManager:
    """The loss in parts, and every part kept for backward."""
    right = jax.checkpoint
    return patch.object(jax, "checkpoint", lambda part, **how: right(part, **how) if how else part)


def parts_in_pairs() -> AbstractContextManager:
    """Two parts' logits exist at once."""
    return patch.object(model.lax, "map", partial(jax.lax.map, batch_size=2))


CASES = [
    *((engine, FULL, {}, {}, nullcontext, "") for engine in ENGINES),
    *((engine, DOTS, IN_PARTS, {}, nullcontext, "") for engine in ENGINES),
    *((engine, layout, {}, {}, nullcontext, "") for engine in ENGINES for layout in (GPIPE, INTERLEAVED)),
    ("jax-manual", Layout(pp=2, microbatches=2, remat="full"), {}, {}, nullcontext, ""),
    ("jax-compiler", FULL, {}, {}, half_the_layers_again, "layout.remat = full was asked for"),
    ("jax-explicit", Layout(), IN_PARTS, {}, kept_logits, "2, whose logits are kept for backward"),
    ("jax-manual", Layout(), IN_PARTS, {}, parts_in_pairs, "2, and 1 products for them in a pass"),
    *(
        (engine, GPIPE, {}, {"microbatches": 2}, nullcontext, "blocks that forward runs = 18 was asked for")
        for engine in ENGINES[:2]
    ),
    *(
        (engine, INTERLEAVED, {}, {"schedule": "gpipe", "chunks": 1}, nullcontext, "blocks that forward runs")
        for engine in ENGINES[:2]
    ),
]


@pytest.mark.parametrize(("engine", "layout", "fields", "done", "plant", "says"), CASES)
def test_work_is_what_was_asked_for_or_red(tmp_path, engine, layout, fields, done, plant, says):
    """Traced, and not compiled."""
    asked = edited(experiment_of(layout), fields)
    with plant():
        work = traced_work(engine, edited(asked, {"layout": done}))
    (tmp_path / "run").mkdir()
    record = make_record(tmp_path / "run" / engine, asked, engine=engine, tensors={}, ladder=False)
    objections = strategy_of(replace(record, work=work)).objections
    assert bool(objections) == bool(says), objections
    assert says in "; ".join(objections)


def traced_work(name: str, experiment: Experiment):
    engine, state = engine_and_state(name, experiment)
    return work_of(trace_train(engine, state).jaxpr, engine.ticks)
