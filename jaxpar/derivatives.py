"""Operations whose derivatives are written out, because autodiff's are slow programs on a CPU.

They compute what the plain ones compute. What JAX would make of the plain ones, and what it costs:

    the gradient of a weight    the product g^T x, then transposed. XLA's matrix product on a CPU writes its
                                left factor anew, transposed, with long strides, and computes it on the way
                                if it can (GELU's derivative): here the smaller of x and g is on the left.
    scores of attention         a gradient in the softmax's dtype: for 16 bits two products in 32.
    GELU                        two branches of erfc, and their derivatives; written out it is one erf.

Legend: I the contracted dims, O the dims that replace them; B batch, T and S position, H heads, D head_dim.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike


def _product(
    x: jax.Array, weight: jax.Array, contracted: int, out_sharding: PartitionSpec | None = None
) -> jax.Array:
    """x (..., I) with its last `contracted` dims summed against the first ones of weight (I, O): (..., O).

    Differentiable in reverse mode only, as every custom_vjp. `out_sharding` is as of `jnp.tensordot`: where
    arrays' types say where they live, and so do their gradients.
    """
    return jnp.tensordot(x, weight, contracted, out_sharding=out_sharding)


product = jax.custom_vjp(_product, nondiff_argnums=(2, 3))


def _product_backward(
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


# Remat policies see the product itself: they take a function with a derivative of its own for no product.
product.defvjp(lambda x, weight, *how: (_product(x, weight, *how), (x, weight)), _product_backward)


def multiply_matrices(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """`product` as one of two matrices: `contracted` dims of I are merged, and so are those of O."""
    inputs, outputs = weight.shape[:contracted], weight.shape[contracted:]
    batch = x.shape[: x.ndim - contracted]
    x_I = x.reshape(*batch, math.prod(inputs))
    weight_IO = weight.reshape(math.prod(inputs), math.prod(outputs))
    return product(x_I, weight_IO, 1).reshape(*batch, *outputs)


def type_of_gradient(x: jax.Array) -> NamedSharding | None:
    """Where a gradient lives, as the type of what it is of says; None where types say nothing.

    That of what is reduced is a sum to be made, and the other way round ("Autodiff and sharding" in JAX's
    documentation). Types speak of explicit axes alone.
    """
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec = sharding.spec
    return sharding.update(
        spec=PartitionSpec(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced)
    )


def _scores(q_BHTD: jax.Array, k_BHSD: jax.Array, dtype: DTypeLike) -> jax.Array:
    """q k, (B, H, T, S) in this dtype. Backward rounds its gradient to that of q, for products in 16 bits."""
    return jnp.einsum("BHTD,BHSD->BHTS", q_BHTD, k_BHSD, preferred_element_type=dtype)


attention_scores = jax.custom_vjp(_scores, nondiff_argnums=(2,))


def _scores_backward(
    dtype: DTypeLike, residuals: tuple[jax.Array, jax.Array], g_BHTS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    q_BHTD, k_BHSD = residuals
    g_BHTS = g_BHTS.astype(q_BHTD.dtype)
    of_q_BHTD = jnp.einsum("BHTS,BHSD->BHTD", g_BHTS, k_BHSD)
    return of_q_BHTD, jnp.einsum("BHTS,BHTD->BHSD", g_BHTS, q_BHTD)


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
