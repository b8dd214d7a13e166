"""The linear map that a model is made of, with its hooks and dtypes. I inputs, O outputs."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from compare.spec.experiment import Precision
from jaxpar.derivatives import product

KEEPS = "keeps_"
"""Scopes of what 16 bits leave in the storage dtype: one of `contract.work.Kept` behind it."""
Hook = Callable[[jax.Array], jax.Array]


class Dtypes:
    """`storage` of weights, residual stream, LayerNorm, softmax and loss; `compute` of matrix products."""

    def __init__(self, precision: Precision):
        self.storage = jnp.float64 if precision.dtype == "float64" else jnp.float32
        self.compute = jnp.dtype(precision.dtype)


class Linear(nnx.Module):
    """An affine map of x (..., I) to (..., O) by a weight (I, O) and a bias (O), each letter one dim or more.

    Hooks: `enter` takes the input, `multiply` (x, weight, dims of I), `leave` the product before its bias.
    """

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool, dtypes: Dtypes):
        self.contracted = len(inputs)
        self.compute = dtypes.compute
        self.weight = nnx.Param(jnp.zeros((*inputs, *outputs), dtypes.storage))
        self.bias = nnx.Param(jnp.zeros(outputs, dtypes.storage)) if bias else None
        self.enter: Hook = same
        self.multiply: Callable[[jax.Array, jax.Array, int], jax.Array] = multiply_matrices
        self.leave: Hook = same

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.leave(self.product(self.enter(x)))
        return y if self.bias is None else y + self.bias[...].astype(self.compute)

    def product(self, x: jax.Array) -> jax.Array:
        """The affine map before its bias."""
        return self.multiply(x.astype(self.compute), self.weight[...].astype(self.compute), self.contracted)


def same(x: Any) -> Any:
    """x as it is."""
    return x


def multiply_matrices(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """x (..., I) times weight (I, O) as a product of two matrices, `contracted` dims of I joined."""
    inputs, outputs = weight.shape[:contracted], weight.shape[contracted:]
    batch = x.shape[: x.ndim - contracted]
    x_I = x.reshape(*batch, math.prod(inputs))
    weight_IO = weight.reshape(math.prod(inputs), math.prod(outputs))
    return product(x_I, weight_IO, 1).reshape(*batch, *outputs)
