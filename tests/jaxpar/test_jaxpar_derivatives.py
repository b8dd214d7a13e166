"""Written derivatives are finite and have the right dtypes. Tests against nanoGPT check their values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.attention import dense_attention
from jaxpar.derivatives import gelu, matmul
from jaxpar.measure.work import operations


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape))


def test_gelu_is_finite_at_the_ends_of_float32():
    """At the ends Phi is 0 or 1 and the density is 0; the result must not be infinite or NaN."""
    x = jnp.asarray([-1e30, -40.0, 0.0, 40.0, 1e30], jnp.float32)
    np.testing.assert_array_equal(gelu(x), np.float32([0, 0, 0, 40, 1e30]))
    np.testing.assert_array_equal(jax.vmap(jax.grad(gelu))(x), [0, 0, 0.5, 1, 1])


def test_weight_gradient_has_x_on_the_left():
    """The written rule has x on the left. Autodiff of the plain product has g there."""

    def left_of_weight_gradient(multiply: Callable) -> tuple[int, ...]:
        def gradient(x: jax.Array, weight: jax.Array, g: jax.Array) -> jax.Array:
            return jax.vjp(lambda weight: multiply(x, weight), weight)[1](g)[0]

        traced = jax.make_jaxpr(gradient)(draw(5, 4), draw(4, 7), draw(5, 7))
        products = [e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general"]
        return products[-1].invars[0].aval.shape

    assert left_of_weight_gradient(lambda x, weight: matmul(x, weight, 1)) == (5, 4)
    assert left_of_weight_gradient(jnp.matmul) == (5, 7)


def test_softmax_of_bfloat16_is_float32():
    q, k, v = (draw(1, 4, 2, 8).astype(jnp.bfloat16) for _ in range(3))
    y, back = jax.vjp(dense_attention, q, k, v)
    assert {x.dtype for x in (y, *back(y))} == {jnp.dtype(jnp.bfloat16)}
    traced = jax.make_jaxpr(lambda *qkv: jax.vjp(dense_attention, *qkv)[1](y))(q, k, v).jaxpr
    names = {"exp": jnp.float32, "dot_general": jnp.bfloat16}
    for name, dtype in names.items():
        dtypes = [eqn.invars[0].aval.dtype for eqn, _, _ in operations(traced) if eqn.primitive.name == name]
        assert set(dtypes) == {jnp.dtype(dtype)}, name
