"""Functions of the model without parameters: rotation of queries and keys, activations, loss.

Legend: B batch, T position, H heads, D head_dim, V vocabulary.
"""

import jax
import jax.numpy as jnp
import optax

from jaxpar.derivatives import gelu

KEEPS = "keeps_"
"""Prefix of scopes that stay in the storage dtype under 16 bits; a name of `contract.work.Kept` follows."""
RELU = "relu_squared"
"""Scope of that activation: it has no primitive of its own."""


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
