"""An attention core put into the model from outside: the same numbers, on one device and with split heads."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import jax_steps
import msgspec
import numpy as np
import pytest

from compare.numerics.optimizer import step_scalars
from compare.numerics.parameters import initial_parameters
from compare.spec.experiment import Layout, Model
from jaxpar import compiler, manual, weights
from jaxpar.comm.mesh import make_mesh
from jaxpar.model import GPT
from jaxpar.optimizer import make_optimizer, state_like
from jaxpar.problem import in_order
from jaxpar.setup import make_problem

MODEL = Model(n_layer=2, n_head=4, n_embd=16, block_size=8, vocab_size=32, bias=True)
HEADS = {compiler.parallelize: 4, manual.parallelize: 2}  # of a core under tp = 2: XLA splits a whole one


def written_out(
    q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array, *, heads: set[int], temperature: float = 1.0
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v with a mask, as matrix products of (B, H, T, D)."""
    heads.add(q_BTHD.shape[2])
    q_BHTD, k_BHTD, v_BHTD = (x.swapaxes(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
    scores_BHTT = q_BHTD @ k_BHTD.swapaxes(2, 3) / (temperature * math.sqrt(q_BHTD.shape[-1]))
    future_TT = jnp.triu(jnp.ones(scores_BHTT.shape[-2:], bool), 1)
    weights_BHTT = jnp.exp(jnp.where(future_TT, -jnp.inf, scores_BHTT))
    weights_BHTT = weights_BHTT / weights_BHTT.sum(-1, keepdims=True)
    return (weights_BHTT @ v_BHTD).swapaxes(1, 2)


def first_step(parallelize, layout, core=None) -> dict[str, np.ndarray]:
    """Loss and gradients of the first step, by name."""
    experiment = jax_steps.experiment_of(layout, model=MODEL, batch_size=4)

    def put_core(model: GPT) -> None:
        if core is not None:
            model.blocks.attention.core = core

    whole = make_problem(experiment, remat="dots")
    problem = replace(whole, build=lambda edit: whole.build(in_order([put_core, edit])))
    optimizer = make_optimizer(experiment.optimizer, decay=weights.decay_mask(MODEL, "matrices"))
    sharded = parallelize(problem, optimizer, mesh=make_mesh(layout, platform="cpu"), layout=layout)
    named = initial_parameters(experiment)
    params = jax.device_put(sharded.pad(weights.from_canonical(named, MODEL)), sharded.params)
    state = jax.jit(optimizer.init, out_shardings=state_like(optimizer, params, sharded.moments))(params)
    tokens_ABT = np.random.default_rng(1).integers(0, MODEL.vocab_size, (2, 2, 4, MODEL.block_size))
    batch = jax.device_put(dict(zip(("inputs", "targets"), tokens_ABT, strict=True)), sharded.batch)
    scalars = msgspec.structs.asdict(step_scalars(experiment.optimizer, 0))
    run = jax.jit(sharded.step, compiler_options=sharded.compiler_options)
    _, _, metrics, gradients = run(params, state, batch, scalars)
    return {"loss": np.asarray(metrics["loss"])} | weights.to_canonical(sharded.unpad(gradients), MODEL)


def worst_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert list(found) == list(expected)
    return max(np.abs(found[name] - x).max() / np.abs(x).max() for name, x in expected.items())


@pytest.mark.parametrize("parallelize", HEADS, ids=["jax-compiler", "jax-manual"])
def test_a_core_of_ones_own_gives_the_same_loss_and_gradients(parallelize):
    one_device = first_step(compiler.parallelize, Layout())
    for layout, expected in ((Layout(), 4), (Layout(tp=2), HEADS[parallelize])):
        heads: set[int] = set()
        swapped = first_step(parallelize, layout, partial(written_out, heads=heads))
        assert min(heads) == expected  # this device's; the whole model is traced too, to check the edits
        assert worst_error(swapped, one_device) <= 1e-12


def test_another_core_gives_other_numbers():
    """So the edit is not lost on its way."""
    other = partial(written_out, heads=set(), temperature=1.1)
    one_device = first_step(compiler.parallelize, Layout())
    assert worst_error(first_step(manual.parallelize, Layout(tp=2), other), one_device) > 1e-6
