"""Stages as a dim of the arrays: any model against a plain scan, on a mesh and on one device."""

from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.spec.axes import AXES, PP
from jaxpar.compiler.pipeline_parallel import pipelined
from jaxpar.hooks import Hooks
from jaxpar.model import PipelineParts
from jaxpar.placement import Placement
from jaxpar.tick_loop import microbatch_slots

WIDTH = 6


def layer(x, w):
    """Not finite at zero, which no idle stage must be given."""
    return jnp.tanh(x @ w) + x / jnp.linalg.norm(x, axis=-1, keepdims=True), None


PARTS = PipelineParts(
    embed=lambda params, batch: batch["x"] @ params["first"],
    layers=lambda params, x, batch, first: jax.lax.scan(layer, x, params["blocks"])[0],
    loss=lambda params, x, batch: jnp.square(x @ params["first"].T - batch["y"]).mean(),
)


def plain(params, batch):
    """All of the batch, without a pipeline."""
    joined = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    return PARTS.loss(params, PARTS.layers(params, PARTS.embed(params, joined), joined, 0), joined)


# stages, microbatches, chunks: as many as stages, more, fewer, and numbers that do not divide
SHAPES = [(1, 2, 1), (2, 1, 1), (2, 5, 1), (4, 3, 1), (2, 4, 2), (2, 2, 3)]


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), SHAPES)
def test_any_model_equals_its_plain_scan(stages, microbatches, chunks):
    mesh = jax.make_mesh((stages,), ("pp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:stages])
    layers = lcm(stages * chunks, 4)
    draw = np.random.default_rng(0).standard_normal
    params = {"first": draw((3, WIDTH)), "blocks": draw((layers, WIDTH, WIDTH))}
    batch = {"x": draw((microbatches, 2, 3)), "y": draw((microbatches, 2, 3))}
    value, gradients = jax.value_and_grad(plain)(params, batch)

    degrees = dict.fromkeys(AXES, 1) | {PP: stages}
    place = Placement(shape=params["blocks"].shape, dims={PP: 0}, degrees=degrees, chunks=chunks)
    spread = NamedSharding(mesh, P("pp"))
    stored = {"first": params["first"], "blocks": jax.device_put(place.pad(params["blocks"]), spread)}
    loss = pipelined(PARTS, Hooks(), stages=stages, chunks=chunks)
    with jax.set_mesh(mesh):
        (found, _), of_stored = jax.jit(jax.value_and_grad(loss, has_aux=True))(stored, batch)

    np.testing.assert_allclose(found, value, rtol=1e-13)
    np.testing.assert_allclose(of_stored["first"], gradients["first"], rtol=1e-12)
    np.testing.assert_allclose(place.unpad(np.asarray(of_stored["blocks"])), gradients["blocks"], atol=1e-13)


def test_every_microbatch_enters_and_leaves_once():
    for stages in range(1, 9):
        for microbatches in range(1, 17):
            enters, leaves, counts = microbatch_slots(microbatches, stages)
            assert enters.T.ravel()[:microbatches].tolist() == list(range(microbatches))
            assert sorted(leaves[counts]) == list(range(microbatches))
            if microbatches % stages == 0:  # then lanes have rolled all the way round
                assert (np.roll(leaves, -1, axis=1) == enters).all()
