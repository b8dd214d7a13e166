"""An attention core put into the model from outside: the same numbers, on one device and with split heads."""

import math
from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from jax_steps import MODEL, two_steps, worst_errors

from compare.spec.experiment import Layout
from jaxpar.problem import Problem

HEADS = {"jax-compiler": MODEL.n_head, "jax-manual": MODEL.n_head // 2}
"""Of a core under tp = 2: XLA splits a whole one."""


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


def errors_of(engine: str, core) -> dict[str, float]:
    """Of two steps under tp = 2 with this core."""
    loss = Problem.loss

    def put_core(model) -> None:
        model.blocks.attention.core = core

    with patch.object(Problem, "loss", lambda self, edits=(): loss(self, [put_core, *edits])):
        return worst_errors(two_steps.__wrapped__(engine, Layout(tp=2)))


@pytest.mark.parametrize("engine", HEADS)
def test_a_core_of_ones_own_gives_the_same_numbers(engine):
    heads: set[int] = set()
    assert max(errors_of(engine, partial(written_out, heads=heads)).values()) <= 1e-10
    assert heads == {HEADS[engine]}  # this device's


def test_another_core_gives_other_numbers():
    """So the edit is not lost on its way."""
    errors = errors_of("jax-manual", partial(written_out, heads=set(), temperature=1.1))
    assert errors["0 gradient"] > 1e-6
