"""What products in 16 bits leave in float32: mistakes that numbers do not show, planted together."""

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from msgspec.structs import replace

from compare.contract.record import Record, read_record
from compare.contract.request import REQUEST, Request
from compare.judge.ladder import climb
from compare.judge.strategy import strategy_of
from compare.spec.experiment import Data, Experiment, edited
from compare.system.json_files import write_json
from jaxpar import model, train
from jaxpar.functional import KEEPS

BOTH = "bfloat16, float32"


def rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def later_weights(make):
    """The optimizer's weights are rounded from the second update on, whose bias correction is another one."""

    def wrong(spec, **options) -> optax.GradientTransformationExtraArgs:
        right = make(spec, **options)

        def update(gradients, state, params=None, **of_step):
            updates, state = right.update(gradients, state, params, **of_step)
            is_later = of_step["scalars"]["bias_correction1"] > 1.5 * (1 - spec.beta1)
            wrong = jax.tree.map(lambda u, w: jnp.where(is_later, rounded(w + u) - w, u), updates, params)
            return wrong, state

        return optax.GradientTransformationExtraArgs(right.init, update)

    return wrong


def norm(self: nnx.LayerNorm, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.bfloat16)
    x -= x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon) * self.scale + self.bias


@jax.named_scope(f"{KEEPS}residual")
def residual(x: jax.Array, y: jax.Array) -> jax.Array:
    return rounded(x + y)


right_losses = optax.softmax_cross_entropy_with_integer_labels


def losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return right_losses(logits.astype(jnp.bfloat16), targets).astype(jnp.float32)


def trained(folder: Path, experiment: Experiment) -> Record:
    request = Request(engine="jax-explicit", experiment=experiment, ladder=True, later_step=3)
    folder.mkdir()
    write_json(folder / REQUEST, request)
    train.train(request, folder)
    return read_record(folder)


def test_what_stays_in_float32_is_seen(tmp_path, tiny, without_x64):
    sections = {"train": {"max_iters": 4}, "precision": {"dtype": "bfloat16"}}
    half = edited(replace(tiny, data=Data(source="synthetic")), sections)
    right = trained(tmp_path / "right", half)
    assert climb(right, right).passed
    with ExitStack() as stack:
        for owner, name, wrong in (
            (train, "make_optimizer", later_weights(train.make_optimizer)),
            (nnx.LayerNorm, "__call__", norm),
            (model, "add", residual),
            (optax, "softmax_cross_entropy_with_integer_labels", losses),
        ):
            stack.enter_context(patch.object(owner, name, wrong))
        wrong = trained(tmp_path / "wrong", half)
    assert strategy_of(wrong).objections == [
        f"dtype of the {what} = float32 was asked for, and {done} was done"
        for what, done in (("norm", "bfloat16"), ("residual", BOTH), ("loss", "bfloat16"))
    ]
    verdict = climb(right, wrong)
    (update,) = [result for result in verdict.rungs if result.rung == "updates"]
    assert not update.passed
    assert "after step 1, against the update of its own gradients" in update.worst
