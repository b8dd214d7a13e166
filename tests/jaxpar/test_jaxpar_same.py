"""Sameness of sharded arrays with one device."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def difference(sharded, reference):
    with pytest.raises(AssertionError) as error:
        jaxpar.assert_same(sharded, reference)
    return str(error.value)


def test_pytrees_of_any_sharding(mesh):
    x = jax.random.normal(jax.random.key(0), (8, 4))
    for spec in (P(), P("data"), P(("data", "model")), P("data", "model")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        jaxpar.assert_same({"a": [placed], "key": jax.random.key(1)}, {"a": [x], "key": jax.random.key(1)})
    jaxpar.assert_same(x.astype(jnp.bfloat16), x)
    jaxpar.assert_same(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    text = difference(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    assert "kernel" in text
    assert "b: it is only in the reference" in difference({"a": x}, {"a": x, "b": x})


def test_place_and_cause(mesh):
    x = jax.random.normal(jax.random.key(0), (8, 4))
    placed = jax.device_put(x.at[6, 1].add(1.0), NamedSharding(mesh, P("data", "model")))
    text = difference({"layers": [placed]}, {"layers": [x]})
    assert "layers.0 (float" in text
    assert "1 of 32 numbers differ, most at [6, 1]" in text
    assert "only in the parts of device 2" in text
    twice = jax.device_put(2 * x, NamedSharding(mesh, P("data")))
    assert "2 times the reference (axis data has 2, model has 2 devices)" in difference(twice, x)


@pytest.mark.parametrize(
    ("scale", "words"),
    [(1.0, "their sum is the reference: an all-reduce is missing"), (2.0, "their mean is the reference")],
)
def test_missing_psum_is_named(mesh, scale, words):
    """With check_vma=False JAX believes that the copies are equal, and shows the first."""
    x = jax.random.normal(jax.random.key(0), (8, 4))

    def local(x):
        return scale * x.sum(0)

    def right(x):
        return lax.psum(local(x), "data")

    pair = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = {"mesh": pair, "in_specs": P("data"), "out_specs": P(), "check_vma": False}
    expected = x.sum(0)
    jaxpar.assert_same(jax.shard_map(right, **options)(x) / scale, expected)
    text = difference(jax.shard_map(local, **options)(x), expected)
    assert "its 2 copies on ranks or devices differ" in text
    assert words in text
