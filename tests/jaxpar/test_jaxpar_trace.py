"""Trace of a step: against NumPy, gradients of biases, one device under each layout, planted mistakes."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from msgspec.structs import replace

from compare.contract.request import Request
from compare.contract.trace import LOSS, places
from compare.contract.work import ObservedWork
from compare.judge.trace import first_difference
from compare.numerics.data import open_corpus
from compare.numerics.parameters import initial_parameters
from compare.numerics.stream import arrays_of_step
from compare.spec.experiment import Layout, Precision
from jaxpar.hooks import Hooks
from jaxpar.measure.trace import trace_step
from jaxpar.programs import trace_train
from jaxpar.run import Run
from jaxpar.train import make_engine
from tests.support.jax_steps import MODEL, engine_and_state, experiment_of, two_steps
from tests.support.numpy_gpt import numpy_loss

ENGINES = ("jax-compiler", "jax-explicit", "jax-manual")
SMALL = replace(MODEL, n_layer=2, n_head=4, block_size=8, vocab_size=11)
"""tp divides heads, and not the vocabulary."""
GROUPED = replace(SMALL, n_kv_head=2, position="rope", norm="rmsnorm")
DROPPED = replace(GROUPED, dropout=0.2)
EXPERTS = replace(SMALL, n_experts=4, experts_per_token=2, balance=0.1)
Trace = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def run_of(name: str, layout: Layout, model: Any = SMALL, dtype: Any = "float64") -> Run:
    """A run before its first step, whose training step is not compiled."""
    experiment = replace(experiment_of(layout, model=model), precision=Precision(dtype=dtype))
    engine, state = engine_and_state(name, experiment)
    return Run(
        request=Request(engine=name, experiment=experiment),
        corpus=open_corpus(experiment),
        engine=engine,
        state=state,
        work=ObservedWork(products={}, forward={}, again={}, logits_positions=[]),
        train_program=None,  # ty: ignore[invalid-argument-type]
        loss_program=None,
        compile_s=0.0,
        initial_weights_sha256="",
    )


@cache
def one_device(model: Any) -> Trace:
    return trace_step(run_of("jax-compiler", Layout(), model), make_engine)


LAYOUTS = {
    "ddp": (Layout(dp_replicate=2), SMALL),
    "fsdp_tp_sp": (Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True), SMALL),
    "ring": (Layout(dp_replicate=2, cp=2, context="ring", zigzag=True), GROUPED),
    "allgather_tp": (Layout(cp=2, zigzag=True, tp=2, sequence_parallel=True), DROPPED),
    "ulysses": (Layout(dp_shard=2, zero=2, cp=2, context="ulysses"), DROPPED),
    "ep": (Layout(dp_shard=4, ep=2, zero=3), EXPERTS),
}
CASES = [(name, layout) for layout in LAYOUTS for name in ENGINES if layout != "ring" or name == "jax-manual"]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layout_has_the_trace_of_one_device(name, layout):
    run = run_of(name, *LAYOUTS[layout])
    model, shapes = run.experiment.model, {place.name: place.shape for place in places(run.experiment)}
    for found, right in zip(trace_step(run, make_engine), one_device(model), strict=True):
        assert {place: x.shape for place, x in found.items()} == shapes
        largest = {place: np.abs(x).max() for place, x in right.items()}
        errors = {place: np.abs(found[place] - right[place]).max() / largest[place] for place in shapes}
        assert max(errors.values()) <= 1e-12, errors


def test_outputs_equal_numpy():
    """Each place has the output that NumPy computes, with experts, too."""
    for model in (SMALL, EXPERTS, GROUPED):
        run = run_of("jax-compiler", Layout(), model)
        forward, weights = one_device(model)[0], initial_parameters(run.experiment)
        arrays = arrays_of_step(run.corpus, run.experiment, 0)
        for number, (inputs, targets) in enumerate(zip(arrays["inputs"], arrays["targets"], strict=True)):
            seen: dict[str, np.ndarray] = {}
            seen[LOSS] = np.array(numpy_loss(model, weights, inputs, targets, seen))
            assert set(seen) == set(forward)
            for name, x in seen.items():
                np.testing.assert_allclose(forward[name][number], x, rtol=0, atol=1e-12 * np.abs(x).max())


def test_gradients_are_those_of_biases():
    """The gradient of a bias is the sum of its output's gradients. Other places follow from these."""
    (outputs, gradients), numbers = (
        one_device(SMALL),
        two_steps("jax-compiler", Layout(), model=SMALL).numbers,
    )
    weights = initial_parameters(experiment_of(Layout(), model=SMALL))
    expected = {LOSS: np.array([0.5, 0.5])}
    for place, gradient in gradients.items():
        if (bias := numbers.get(f"0 gradient {place}.bias")) is not None:
            np.testing.assert_allclose(gradient.sum(axis=(0, 1, 2)), bias, rtol=0, atol=1e-14)
        elif place.endswith("residual"):
            expected[place] = gradients[place.replace("residual", "mlp.down")]
        elif place.endswith("core"):
            out = place.replace("core", "out")
            expected[place] = np.einsum("abtc,hdc->abthd", gradients[out], weights[f"{out}.weight"])
    for place, gradient in expected.items():
        np.testing.assert_allclose(gradients[place], gradient, rtol=0, atol=1e-14)
    positions = gradients["embedding"].sum(axis=(0, 1))
    np.testing.assert_allclose(positions, numbers["0 gradient embedding.position"], rtol=0, atol=1e-14)
    assert set(expected) | {"embedding"} == {p for p in outputs if f"0 gradient {p}.bias" not in numbers}


def test_gradients_of_router_weights():
    """A chosen expert's weight has the product of its output and the gradient; others have 0."""
    outputs, gradients = one_device(EXPERTS)
    weights = initial_parameters(experiment_of(Layout(), model=EXPERTS))
    for mlp in (f"blocks.{layer}.mlp" for layer in range(EXPERTS.n_layer)):
        hidden = np.einsum(
            "abtc,ecm->abtem", outputs[mlp.replace("mlp", "norm2")], weights[f"{mlp}.up.weight"]
        )
        hidden = np.asarray(jax.nn.gelu(hidden, approximate=False))
        of_expert = np.einsum("abtem,emc->abtec", hidden, weights[f"{mlp}.down.weight"])
        expected = np.einsum("abtec,abtc->abte", of_expert, gradients[f"{mlp}.experts"])
        expected[outputs[f"{mlp}.router"] == 0] = 0
        np.testing.assert_allclose(gradients[f"{mlp}.router"], expected, rtol=0, atol=1e-15)
        assert (np.count_nonzero(expected, axis=-1) == EXPERTS.experts_per_token).all()


def test_gradients_have_no_loss_scale():
    """In float16 backward starts from the loss times 65,536, and some gradients are too small without it."""
    run = run_of("jax-manual", Layout(dp_replicate=2), dtype="float16")
    run.state.loss_scale = run.request.first_loss_scale
    gradients = trace_step(run, make_engine)[1]
    for place, expected in one_device(SMALL)[1].items():
        error = np.abs(gradients[place] - expected).max() / np.abs(expected).max()
        assert error <= 0.02, place  # measured: 0.001


@jax.custom_vjp
def double_gradient(x: jax.Array) -> jax.Array:
    return x


double_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (2 * gradient,))


def scale_on_one_device(hooks: Hooks) -> None:
    right = hooks.down.after
    hooks.down.after = lambda y: right(y) * (1 + 0.01 * (lax.axis_index("dp_replicate") == 1))


def double_before_up(hooks: Hooks) -> None:
    hooks.up.before = double_gradient


def scale_queries(hooks: Hooks) -> None:
    hooks.core = lambda q, *kv, **options: Hooks().core(1.01 * q, *kv, **options)


MISTAKES = [
    (scale_on_one_device, "forward", "blocks.0.mlp.down", 1.01, {"dp_replicate": [1]}),
    (scale_queries, "forward", "blocks.0.attention.core", None, {}),
    (double_before_up, "backward", "blocks.1.norm2", 2.0, {}),
]


@pytest.mark.parametrize(
    ("mistake", "direction", "place", "ratio", "devices"), MISTAKES, ids=[m.__name__ for m, *_ in MISTAKES]
)
def test_mistake_is_named(mistake, direction, place, ratio, devices):
    def make_wrong(name, experiment, mesh, loss_of):
        def loss_of_wrong(experiment, hooks):
            mistake(hooks)
            return loss_of(experiment, hooks)

        return make_engine(name, experiment, mesh, loss_of_wrong)

    run = run_of("jax-manual", Layout(dp_replicate=2))
    found = first_difference(one_device(SMALL), trace_step(run, make_wrong), run.experiment, dtype="float64")
    assert (found.direction, found.place, found.devices) == (direction, place, devices)
    assert (found.ratio or None) == (ratio and pytest.approx(ratio))


def test_training_has_the_same_program_after_a_trace():
    run = run_of("jax-manual", Layout())
    texts = [trace_train(run.engine, run.state).lower().as_text()]
    trace_step(run, make_engine)
    texts.append(trace_train(run.engine, run.state).lower().as_text())
    assert texts[0] == texts[1]
