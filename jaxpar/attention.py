"""The attention core: causal, without parameters, its derivative written out.

Not jax.nn.dot_product_attention: its softmax is float32 even for float64 inputs, which put 3e-8 between
layouts that should agree to 1e-15. Not autodiff of a plain softmax: written out, backward is one pass over
the weights, because sum_S(dA A) = sum_D(dy y), as in FlashAttention (Dao et al., arXiv 2205.14135, section
B.2), with dropout as without. Products are of (B, H, T, D), which is how XLA multiplies: anything else it
copies into that first.

Legend: B batch, T position of the query, S of the key, H heads, D head_dim.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def causal_attention(
    q_BTHD: jax.Array,
    k_BSHD: jax.Array,
    v_BSHD: jax.Array,
    *,
    softmax_dtype: DTypeLike,
    factor_BHTS: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k / sqrt(D)) v over positions S <= T, softmax in `softmax_dtype`: (B, T, H, D).

    `factor_BHTS`, a constant, is what weights are multiplied by after the softmax: dropout's. Differentiable
    in reverse mode only, as every custom_vjp.
    """
    q_BHTD, k_BHSD, v_BHSD = (x.swapaxes(1, 2) for x in (q_BTHD, k_BSHD, v_BSHD))
    return _attend(q_BHTD, k_BHSD, v_BHSD, factor_BHTS, softmax_dtype).swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q_BHTD: jax.Array,
    k_BHSD: jax.Array,
    v_BHSD: jax.Array,
    factor_BHTS: jax.Array | None,
    softmax_dtype: DTypeLike,
) -> jax.Array:
    return _forward(q_BHTD, k_BHSD, v_BHSD, factor_BHTS, softmax_dtype)[0]


def _forward(
    q_BHTD: jax.Array,
    k_BHSD: jax.Array,
    v_BHSD: jax.Array,
    factor_BHTS: jax.Array | None,
    softmax_dtype: DTypeLike,
) -> tuple[jax.Array, tuple[Any, ...]]:
    length, head_dim = q_BHTD.shape[-2:]
    logits_BHTS = jnp.einsum("BHTD,BHSD->BHTS", q_BHTD, k_BHSD, preferred_element_type=softmax_dtype)
    visible_TS = jnp.tril(jnp.ones((length, length), bool))
    logits_BHTS = jnp.where(visible_TS, logits_BHTS / math.sqrt(head_dim), -jnp.inf)
    exponential_BHTS = jnp.exp(logits_BHTS - logits_BHTS.max(axis=-1, keepdims=True))
    weights_BHTS = exponential_BHTS / exponential_BHTS.sum(axis=-1, keepdims=True)
    used_BHTS = _times(weights_BHTS, factor_BHTS).astype(v_BHSD.dtype)
    y_BHTD = jnp.einsum("BHTS,BHSD->BHTD", used_BHTS, v_BHSD)
    return y_BHTD, (q_BHTD, k_BHSD, v_BHSD, factor_BHTS, weights_BHTS, y_BHTD)


def _backward(
    softmax_dtype: DTypeLike, residuals: tuple[Any, ...], g_BHTD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q_BHTD, k_BHSD, v_BHSD, factor_BHTS, weights_BHTS, y_BHTD = residuals
    used_BHTS = _times(weights_BHTS, factor_BHTS).astype(v_BHSD.dtype)
    of_v_BHSD = jnp.einsum("BHTS,BHTD->BHSD", used_BHTS, g_BHTD)
    of_used_BHTS = jnp.einsum("BHTD,BHSD->BHTS", g_BHTD, v_BHSD, preferred_element_type=softmax_dtype)
    of_weights_BHTS = _times(of_used_BHTS, factor_BHTS)
    mean_BHT1 = (g_BHTD.astype(softmax_dtype) * y_BHTD).sum(axis=-1, keepdims=True)
    of_logits_BHTS = weights_BHTS * (of_weights_BHTS - mean_BHT1) / math.sqrt(q_BHTD.shape[-1])
    of_logits_BHTS = of_logits_BHTS.astype(q_BHTD.dtype)
    of_q_BHTD = jnp.einsum("BHTS,BHSD->BHTD", of_logits_BHTS, k_BHSD)
    of_k_BHSD = jnp.einsum("BHTS,BHTD->BHSD", of_logits_BHTS, q_BHTD)
    return of_q_BHTD, of_k_BHSD, of_v_BHSD, None


def _times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


_attend.defvjp(_forward, _backward)
