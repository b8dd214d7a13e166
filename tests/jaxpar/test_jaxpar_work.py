"""The observed work of a traced step: right steps have no objection, a step of another layout has one."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from compare.contract.communication import ACTIVATIONS
from compare.judge.strategy import strategy_of
from compare.numerics.parameters import initial_parameters
from compare.spec.experiment import Experiment, Layout, Precision, edited
from jaxpar.hooks import Hooks, LinearHooks
from jaxpar.manual import ring
from jaxpar.measure.work import work_of
from jaxpar.model import loss_function
from jaxpar.programs import trace_train
from jaxpar.weights import from_canonical
from tests.support.jax_steps import MODEL, engine_and_state, experiment_of
from tests.support.records import make_record

GPIPE = Layout(pp=2, schedule="gpipe", microbatches=4)
INTERLEAVED = Layout(pp=2, schedule="interleaved", chunks=2, microbatches=2)
FULL, DOTS = Layout(dp_replicate=2, remat="full"), Layout(dp_shard=2, zero=3)
"""A scan keeps dots by default."""
IN_PARTS = {"train": {"loss_chunks": 2}}
ENGINES = ("jax-compiler", "jax-explicit", "jax-manual")
RIGHT = {"full": (FULL, {}), "dots": (DOTS, IN_PARTS), "gpipe": (GPIPE, {}), "interleaved": (INTERLEAVED, {})}
IGNORED = {
    "microbatches": (GPIPE, {"microbatches": 2}, "blocks that forward runs = 18 was asked for"),
    "schedule": (INTERLEAVED, {"schedule": "gpipe", "chunks": 1}, "blocks that forward runs"),
}


def objections(folder: Path, engine: str, asked: Experiment, done: dict) -> str:
    """Objections to the work of a step that is traced, and not compiled, with other fields of the layout."""
    traced, state = engine_and_state(engine, edited(asked, {"layout": done}))
    work = work_of(trace_train(traced, state).jaxpr, traced.ticks)
    record = make_record(folder / "run", asked, engine=engine, tensors={}, ladder=False)
    return "; ".join(strategy_of(replace(record, work=work)).objections.values())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RIGHT)
def test_work_of_a_right_step(tmp_path, name, engine):
    layout, fields = RIGHT[name]
    assert objections(tmp_path, engine, edited(experiment_of(layout), fields), {}) == ""


NARROW = {
    "": Hooks(),
    "rotation": Hooks(local_rows=lambda table, length: table[:length].astype(jnp.bfloat16)),
    "norm": Hooks(broadcast=lambda w, x: w.astype(jnp.bfloat16)),
    "router": Hooks(router=LinearHooks(before=lambda x: x.astype(jnp.bfloat16))),
}
"""Hooks that round an operand of a part."""


@pytest.mark.parametrize("name", NARROW)
def test_dtypes_of_a_model_in_16_bits(name):
    model = replace(MODEL, position="rope", norm="rmsnorm", n_experts=2)
    experiment = Experiment(model=model, precision=Precision(dtype="bfloat16"))
    params = from_canonical(initial_parameters(experiment), model)
    batch = dict.fromkeys(("inputs", "targets"), np.zeros((2, model.block_size), int))
    kept = work_of(jax.make_jaxpr(loss_function(experiment, NARROW[name]))(params, batch)).kept
    assert kept.keys() == {"norm", "router", "rotation", "residual", "softmax", "loss"}
    assert [part for part, dtypes in kept.items() if dtypes != ["float32"]] == ([name] if name else [])


def test_work_of_a_ring(tmp_path, monkeypatch):
    """A hop is waited for where products depend on it. Other code of the step may stand in any order."""
    experiment = experiment_of(Layout(cp=2, context="ring", remat="full"))
    assert objections(tmp_path / "right", "jax-manual", experiment, {}) == ""

    def after_the_hop(visit, state, kv_2BKtD):
        arriving_2BKtD = ring.send_to_next(kv_2BKtD, purpose=ACTIVATIONS)
        kv_2BKtD, arriving_2BKtD = jax.lax.optimization_barrier((kv_2BKtD, arriving_2BKtD))
        rank = jax.lax.axis_index("cp")
        return visit(visit(state, kv_2BKtD, rank), arriving_2BKtD, 1 - rank)

    monkeypatch.setattr(ring, "pass_around", after_the_hop)
    assert "in the order hw (h hop" in objections(tmp_path / "wrong", "jax-manual", experiment, {})


def test_work_of_1f1b(tmp_path):
    layout = Layout(pp=2, microbatches=2, remat="full")
    assert objections(tmp_path, "jax-manual", experiment_of(layout), {}) == ""


@pytest.mark.parametrize("engine", ENGINES[:2])
@pytest.mark.parametrize("name", IGNORED)
def test_work_of_an_ignored_setting(tmp_path, name, engine):
    layout, done, words = IGNORED[name]
    assert words in objections(tmp_path, engine, experiment_of(layout), done)
