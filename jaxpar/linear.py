"""Linear maps, norms, and their dtypes. I inputs, O outputs, C n_embd."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from compare.spec.experiment import Model, Precision
from jaxpar.functional import KEEPS
from jaxpar.hooks import Hooks, LinearHooks


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
        return y if self.bias is None else y + self.hooks.broadcast(self.bias[...].astype(self.compute), y)

    def product(self, x: jax.Array) -> jax.Array:
        """The map without its bias."""
        weight = self.weight[...].astype(self.compute)
        return self.hooks.matmul(x.astype(self.compute), weight, self.contracted)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last dim C, in the storage dtype, as PyTorch's.

    The variance is the mean of (x - mean)^2. The faster form, which flax has by default, cancels in float32.
    """

    def __init__(self, config: Model, dtypes: Dtypes, hooks: Hooks):
        has_mean = config.norm == "layernorm"
        self.has_mean, self.epsilon, self.hooks = has_mean, config.norm_eps, hooks
        self.scale = nnx.Param(jnp.ones(config.n_embd, dtypes.storage))
        self.bias = nnx.Param(jnp.zeros(config.n_embd, dtypes.storage)) if has_mean and config.bias else None

    @jax.named_scope(f"{KEEPS}norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        def operand(w_C: jax.Array) -> jax.Array:
            w = self.hooks.broadcast(w_C, x)
            return w.reshape(*(1,) * (x.ndim - w.ndim), *w.shape)

        centered = x - x.mean(axis=-1, keepdims=True) if self.has_mean else x
        variance = jnp.square(centered).mean(axis=-1, keepdims=True)
        y = centered * (lax.rsqrt(variance + self.epsilon) * operand(self.scale[...]))
        return y if self.bias is None else y + operand(self.bias[...])
