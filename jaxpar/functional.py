"""Functions of the model without parameters: attention, rotation of queries and keys, activations, loss.

Legend: B batch, T and S position, H heads, K heads of keys and values, D head_dim, V vocabulary.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxpar.derivatives import attention_scores, gelu
from jaxpar.placement import merge_dims

KEEPS = "keeps_"
"""Prefix of scopes that stay in the storage dtype under 16 bits; a name of `contract.work.Kept` follows."""
RELU = "relu_squared"
"""Scope of that activation: it has no primitive of its own."""


def causal_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    *,
    positions: tuple[ArrayLike, ArrayLike] | None = None,
    factor: Callable[[tuple[int, ...]], jax.Array] | None = None,
) -> jax.Array:
    """Attention softmax(q k / sqrt(D)) v over positions S <= T, (B, T, H, D); the softmax has 32 bits or 64.

    K divides H: each head of k and v serves H / K consecutive heads of q. `jax.nn.dot_product_attention` has
    a float32 softmax for float64 inputs, too.

    Args:
        positions: of q (T,) and of k (S,); by default the first T and S.
        factor: makes the dropout factor of a shape (H, T, S), whose S are in the order of the sequence.
    """
    # Heads before positions, as XLA multiplies: it would copy another order into this one.
    q_BHTD, k_BKSD, v_BKSD = (x.swapaxes(1, 2) for x in (q_BTHD, k_BSKD, v_BSKD))
    k_BHSD, v_BHSD = (repeat_heads(x_BKSD, q_BHTD.shape[1]) for x_BKSD in (k_BKSD, v_BKSD))
    logits_BHTS = attention_scores(q_BHTD, k_BHSD, jnp.promote_types(q_BHTD.dtype, jnp.float32))
    with jax.named_scope(f"{KEEPS}softmax"):
        visible_TS = is_visible(*positions) if positions else jnp.tril(jnp.ones(logits_BHTS.shape[-2:], bool))
        logits_BHTS = jnp.where(visible_TS, logits_BHTS / math.sqrt(q_BHTD.shape[-1]), -jnp.inf)
        weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1)
    if factor is not None:
        factor_BHTS = factor(weights_BHTS.shape[1:])
        weights_BHTS = weights_BHTS * (factor_BHTS[..., positions[1]] if positions else factor_BHTS)
    return jnp.einsum("BHTS,BHSD->BHTD", weights_BHTS.astype(v_BHSD.dtype), v_BHSD).swapaxes(1, 2)


def repeat_heads(x_BKSD: jax.Array, heads: int) -> jax.Array:
    """Keys or values for each head of queries: (B, H, S, D)."""
    batch, kv_heads, *others = x_BKSD.shape
    if kv_heads == heads:
        return x_BKSD
    x_BKGSD = jnp.broadcast_to(x_BKSD[:, :, None], (batch, kv_heads, heads // kv_heads, *others))
    return merge_dims(x_BKGSD, 1)


def is_visible(q_positions_T: ArrayLike, k_positions_S: ArrayLike) -> jax.Array:
    """Causal mask, bool (T, S)."""
    return jnp.asarray(q_positions_T)[:, None] >= jnp.asarray(k_positions_S)


def rotate(x_BTHD: jax.Array, turns_T2d: jax.Array) -> jax.Array:
    """RoPE: rotate each pair of a head's features by its position's `compare.numerics.rotation.turns`."""
    first, second = jnp.split(x_BTHD, 2, axis=-1)
    with jax.named_scope(f"{KEEPS}rotation"):
        cos_T1d, sin_T1d = turns_T2d[:, :1], turns_T2d[:, 1:]
        rotated = first * cos_T1d - second * sin_T1d, second * cos_T1d + first * sin_T1d
    return jnp.concatenate(rotated, axis=-1).astype(x_BTHD.dtype)


@jax.named_scope(RELU)
def relu_squared(x: jax.Array) -> jax.Array:
    """max(x, 0)^2, elementwise."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS = {"gelu": gelu, "gelu_tanh": jax.nn.gelu, "relu_squared": relu_squared}


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats over all tokens, in at least float32."""
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()
