"""Operations with hand-written derivatives, because XLA runs autodiff's slowly on a CPU.

    operation                  derivative by autodiff                    derivative here
    product with a weight      g^T x, then a transpose. XLA copies       the smaller of x and g is the left
                               the left factor in transposed order.      factor
    scores of attention        the gradient has the softmax's dtype:     the gradient has the dtype of q:
                               two float32 products                      two 16-bit products
    GELU                       two branches of erfc                      one erf

Results are equal to autodiff's up to rounding.

Legend: I contracted dims, O dims that replace them, B batch, T and S position, H heads, D head_dim.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike


def _matmul(
    x: jax.Array, weight: jax.Array, contracted: int, out_sharding: PartitionSpec | None = None
) -> jax.Array:
    """Sum the last `contracted` dims of x (..., I) against the first of weight (I, O): (..., O).

    Differentiable in reverse mode only, as every custom_vjp. `out_sharding` is the argument of
    `jnp.tensordot`, for arrays with explicit shardings.
    """
    return jnp.tensordot(x, weight, contracted, out_sharding=out_sharding)


matmul = jax.custom_vjp(_matmul, nondiff_argnums=(2, 3))


def _matmul_backward(
    contracted: int,
    out_sharding: PartitionSpec | None,
    residuals: tuple[jax.Array, jax.Array],
    g: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    of_batch = list(range(x.ndim - contracted))
    outputs_of_g = list(range(len(of_batch), g.ndim))
    outputs_of_weight = list(range(contracted, weight.ndim))
    of_x = jnp.tensordot(g, weight, (outputs_of_g, outputs_of_weight), out_sharding=type_of_gradient(x))
    if math.prod(x.shape) <= math.prod(g.shape):
        return of_x, jnp.tensordot(x, g, (of_batch, of_batch), out_sharding=type_of_gradient(weight))
    weight_OI = jnp.moveaxis(weight, range(contracted), range(-contracted, 0))
    of_weight_OI = jnp.tensordot(g, x, (of_batch, of_batch), out_sharding=type_of_gradient(weight_OI))
    return of_x, jnp.moveaxis(of_weight_OI, range(-contracted, 0), range(contracted))


# The lambda exposes the product to remat policies, which do not look inside a custom_vjp.
matmul.defvjp(lambda x, weight, *how: (_matmul(x, weight, *how), (x, weight)), _matmul_backward)


def multiply_matrices(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """As `matmul`, by one product of two matrices: the dims I are merged, and the dims O, too."""
    inputs, outputs = weight.shape[:contracted], weight.shape[contracted:]
    batch = x.shape[: x.ndim - contracted]
    x_I = x.reshape(*batch, math.prod(inputs))
    weight_IO = weight.reshape(math.prod(inputs), math.prod(outputs))
    return matmul(x_I, weight_IO, 1).reshape(*batch, *outputs)


def type_of_gradient(x: jax.Array) -> NamedSharding | None:
    """Sharding of the gradient of x, or None if the mesh has no explicit axes.

    The gradient of a `reduced` array is `unreduced`, and vice versa ("Autodiff and sharding" in JAX's
    documentation).
    """
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec = sharding.spec
    return sharding.update(
        spec=PartitionSpec(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced)
    )


def _scores(q_BHTD: jax.Array, k_BHSD: jax.Array, dtype: DTypeLike) -> jax.Array:
    """q k (B, H, T, S) in `dtype`. Backward rounds its gradient to the dtype of q, for 16-bit products."""
    return jnp.einsum("BHTD,BHSD->BHTS", q_BHTD, k_BHSD, preferred_element_type=dtype)


attention_scores = jax.custom_vjp(_scores, nondiff_argnums=(2,))


def _scores_backward(
    dtype: DTypeLike, residuals: tuple[jax.Array, jax.Array], g_BHTS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    q_BHTD, k_BHSD = residuals
    g_BHTS = g_BHTS.astype(q_BHTD.dtype)
    of_q_BHTD = jnp.einsum("BHTS,BHSD->BHTD", g_BHTS, k_BHSD, out_sharding=type_of_gradient(q_BHTD))
    return of_q_BHTD, jnp.einsum("BHTS,BHTD->BHSD", g_BHTS, q_BHTD, out_sharding=type_of_gradient(k_BHSD))


attention_scores.defvjp(lambda q, k, dtype: (_scores(q, k, dtype), (q, k)), _scores_backward)


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU, x Phi(x), of x of any shape; Phi is the normal distribution (arXiv 1606.08415)."""
    return x * _normal_distribution(x)


@gelu.defjvp
def _gelu_tangent(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    distribution = _normal_distribution(x)
    density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * distribution, t * (distribution + x * density)


def _normal_distribution(x: jax.Array) -> jax.Array:
    return 0.5 * (1 + lax.erf(x / math.sqrt(2)))
