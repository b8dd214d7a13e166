"""Attention cores against the dense one: numbers, gradients, and what is in memory at a time."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from compare.judge.strategy import strategy_of
from compare.spec.attention import core_in_jax
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, Precision, edited, parse
from jaxpar.attention import blockwise_attention, dense_attention
from jaxpar.measure.work import operations, work_of
from jaxpar.programs import trace_train
from tests.support import cudnn_on_cpu
from tests.support.jax_steps import MODEL, engine_and_state, experiment_of, two_steps, worst_errors
from tests.support.records import make_record

SHAPES = {
    "padding": (10, 4, 2, None),
    "one head of keys": (37, 4, 1, None),
    "other order": (37, 2, 2, np.r_[0, np.random.default_rng(1).permutation(np.arange(1, 37))]),
    "long": (520, 2, 1, None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_blockwise_equals_dense(name):
    """The result and the gradients of q, k and v, in float64."""
    length, heads, kv_heads, order_T = SHAPES[name]
    draw = np.random.default_rng(0).standard_normal
    arrays = [draw((2, length, count, 4)) for count in (heads, kv_heads, kv_heads, heads)]
    positions = None if order_T is None else (order_T, order_T)

    def forward_and_back(core, q, k, v, g):
        y, back = jax.vjp(partial(core, positions=positions), q, k, v)
        return y, *back(g)

    found, right = (
        jax.jit(partial(forward_and_back, core))(*arrays) for core in (blockwise_attention, dense_attention)
    )
    for x, expected in zip(found, right, strict=True):
        error = float(jnp.abs(x - expected).max() / jnp.abs(expected).max())
        assert error <= 2e-14  # measured: 1.4e-15


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_memory_of_a_step_grows_with_t(remat):
    """No array of a step has T^2 numbers: neither weights nor masks of all blocks are kept."""
    model = replace(MODEL, n_layer=2, block_size=1024, attention="blockwise")
    experiment = edited(experiment_of(Layout(remat=remat), model=model), {"train": {"batch_size": 1}})
    engine, state = engine_and_state("jax-manual", experiment)
    program = trace_train(engine, state).jaxpr.jaxpr
    sizes = [x.aval.size for equation, _, _ in operations(program) for x in equation.outvars]
    assert max(sizes) < model.block_size**2 / 2


LAYOUTS = {
    "compiler": Layout(cp=2, zigzag=True, tp=2),
    "compiler pipeline": Layout(cp=2, pp=2, schedule="gpipe", microbatches=2),
    "compiler replicas": Layout(cp=2, dp_replicate=2),
    "explicit": Layout(cp=2, zigzag=True, dp_shard=2, zero=3),
    "manual": Layout(cp=2, context="ring", zigzag=True, dp_replicate=2),
    "explicit pipeline": Layout(pp=2, schedule="gpipe", microbatches=2, dp_replicate=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_blockwise_steps_equal_dense_steps(name):
    """Two steps of a layout against two dense steps of one device."""
    model = replace(MODEL, n_layer=2, n_head=4, n_kv_head=2, block_size=16, position="rope")
    outcome = two_steps(f"jax-{name.split()[0]}", LAYOUTS[name], model=replace(model, attention="blockwise"))
    errors = worst_errors(outcome, model)
    assert max(errors.values()) <= 1e-12, errors  # measured: 5e-14


FUSED = {"tp": Layout(dp_replicate=2, tp=2), "ulysses": Layout(cp=2, context="ulysses")}


@pytest.mark.parametrize("engine", ["jax-compiler", "jax-explicit", "jax-manual"])
@pytest.mark.parametrize("layout", FUSED.values(), ids=FUSED)
def test_fused_is_traced_as_on_a_gpu(engine, layout, monkeypatch, without_x64, tmp_path):
    """A step of each engine has cuDNN's primitives: types and partitioning fit, and forward runs once."""
    cudnn_on_cpu.lower_on_cpu(monkeypatch)
    model = replace(MODEL, n_head=2, n_layer=2, block_size=16, attention="fused")
    experiment = edited(experiment_of(layout, model=model), {"precision": {"dtype": "bfloat16"}})
    made, state = engine_and_state(engine, experiment)
    traced = trace_train(made, state)
    traced.lower()
    names = [equation.primitive.name for equation, _, _ in operations(traced.jaxpr.jaxpr)]
    kernels = [name for name in names if name.startswith("dot_product_attention")]
    assert kernels.count("dot_product_attention_fwd_wrapper") == 1 == len(kernels) - 1
    record = make_record(tmp_path / "run", experiment, engine=engine, tensors={}, ladder=False)
    found = strategy_of(replace(record, work=work_of(traced.jaxpr))).found("model.attention")
    assert found == "fused"


def objection(asked: str, done: str, folder: Path) -> str:
    """The objection to a step that is traced with another core than the requested one."""
    experiment = experiment_of(Layout(), model=replace(MODEL, attention=asked))
    engine, state = engine_and_state("jax-manual", edited(experiment, {"model": {"attention": done}}))
    work = work_of(trace_train(engine, state).jaxpr)
    record = make_record(
        folder / f"{asked} {done}", experiment, engine="jax-manual", tensors={}, ladder=False
    )
    return strategy_of(replace(record, work=work)).objections.get("model.attention", "")


def test_record_says_which_core_ran(tmp_path):
    assert objection("blockwise", "blockwise", tmp_path) == objection("auto", "dense", tmp_path) == ""
    assert "found: dense" in objection("blockwise", "dense", tmp_path)


def test_core_that_auto_chooses():
    def core(platform="cpu", length=1024, dtype="float32", layout=None, **fields):
        model = replace(MODEL, n_embd=64, block_size=length, **fields)
        experiment = Experiment(model=model, layout=layout or Layout())
        experiment = edited(experiment, {"precision": {"dtype": dtype}})
        return core_in_jax(experiment, platform=platform, by_types=False)

    assert [core(length=length) for length in (511, 512)] == ["dense", "blockwise"]
    ring = Layout(cp=2, context="ring", zigzag=True)  # chunks of a quarter of the positions
    assert [core(length=length, layout=ring) for length in (1020, 1024)] == ["dense", "blockwise"]
    assert core(dropout=0.1) == core("gpu", dtype="bfloat16", dropout=0.1) == "dense"
    assert core("gpu", dtype="bfloat16") == core("gpu", dtype="float16", length=128) == "fused"
    assert core("gpu") == core(dtype="bfloat16") == core("gpu", dtype="bfloat16", n_head=16) == "blockwise"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("model.attention = 'fused'", "precision.dtype = float32: fused kernels have 16 bits"),
        ("model.attention = 'blockwise'\nmodel.dropout = 0.1", "set model.attention = dense or auto"),
        ("model.attention = 'flash'", "give auto, dense, blockwise or fused"),
    ],
    ids=["float32", "dropout", "unknown"],
)
def test_impossible_core_is_rejected(fields, words):
    with pytest.raises(ExperimentError, match=words):
        parse(fields)


@pytest.mark.parametrize(
    ("engine", "model", "layout", "words"),
    [
        ("jax-manual", {"n_embd": 24}, Layout(), "cuDNN takes heads of 8, 16, .. 128 features"),
        ("jax-manual", {}, Layout(cp=2), "use ulysses"),
        ("jax-explicit", {}, Layout(pp=2, microbatches=2, schedule="gpipe"), "loses the type of gradients"),
        ("torch-manual", {}, Layout(cp=2, context="ring"), "a ring computes blocks"),
    ],
    ids=["heads", "positions", "stages in types", "ring of torch"],
)
def test_fused_that_an_engine_lacks_is_rejected(engine, model, layout, words):
    experiment = Experiment(
        model=replace(MODEL, attention="fused", **model), layout=layout, precision=Precision(dtype="float16")
    )
    assert words in ENGINES[engine].why_not_train(experiment)
    assert not ENGINES[engine].why_not_train(edited(experiment, {"model": {"attention": "blockwise"}}))
