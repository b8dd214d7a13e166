"""Linear maps and their dtypes. I inputs, O outputs."""

import jax
import jax.numpy as jnp
from flax import nnx

from compare.spec.experiment import Precision
from jaxpar.hooks import LinearHooks


class Dtypes:
    """`storage` of weights, residual stream, LayerNorm, softmax and loss; `compute` of matrix products."""

    def __init__(self, precision: Precision):
        self.storage = jnp.float64 if precision.dtype == "float64" else jnp.float32
        self.compute = jnp.dtype(precision.dtype)


class Linear(nnx.Module):
    """An affine map of x (..., I) to (..., O) by a weight (I, O) and a bias (O).

    I and O are one dim or several.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        bias: bool,
        dtypes: Dtypes,
        hooks: LinearHooks | None = None,
    ):
        self.contracted = len(inputs)
        self.compute = dtypes.compute
        self.hooks = hooks or LinearHooks()
        self.weight = nnx.Param(jnp.zeros((*inputs, *outputs), dtypes.storage))
        self.bias = nnx.Param(jnp.zeros(outputs, dtypes.storage)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.hooks.after(self.product(self.hooks.before(x)))
        return y if self.bias is None else y + self.bias[...].astype(self.compute)

    def product(self, x: jax.Array) -> jax.Array:
        """The map without its bias."""
        weight = self.weight[...].astype(self.compute)
        return self.hooks.matmul(x.astype(self.compute), weight, self.contracted)
