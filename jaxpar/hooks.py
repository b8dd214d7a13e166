"""Hooks: the places of the model where a parallelism strategy puts its own function.

The model has no mesh. The defaults compute on one device. A strategy sets fields of `Hooks` before the model
is built.

Legend: B batch, T position, C n_embd, H heads, V vocabulary, L layers, E experts.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpar.attention import call, dense_attention
from jaxpar.derivatives import multiply_matrices
from jaxpar.functional import cross_entropy
from jaxpar.remat import IsGather, Remat

Hook = Callable[[jax.Array], jax.Array]
Indices = Callable[[int], ArrayLike]
"""From the number of local heads, positions or token ids to their global indices."""
Broadcast = Callable[[jax.Array, jax.Array], jax.Array]
"""(w, x) -> w as an operand of x: JAX broadcasts it, if its type allows."""


def identity(x: Any) -> Any:
    """Return x."""
    return x


def first(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return w."""
    return w


@dataclass(eq=False, kw_only=True)
class LinearHooks:
    """A linear map is y + broadcast(bias, y) with y = after(matmul(before(x), weight, n)).

    n is the number of dims that are summed.
    """

    before: Hook = identity
    matmul: Callable[[jax.Array, jax.Array, int], jax.Array] = multiply_matrices
    after: Hook = identity
    broadcast: Broadcast = first


@dataclass(eq=False, kw_only=True)
class Hooks:
    """Functions that the model calls; see the module."""

    # A block's four linear maps: x -> q, k, v -> x -> hidden -> x. With experts, up and down act on all
    # experts.
    qkv: LinearHooks = field(default_factory=LinearHooks)
    out: LinearHooks = field(default_factory=LinearHooks)
    up: LinearHooks = field(default_factory=LinearHooks)
    down: LinearHooks = field(default_factory=LinearHooks)
    router: LinearHooks = field(default_factory=LinearHooks)

    broadcast: Broadcast = first
    """For the scale and the bias of a norm, and the vectors of positions."""

    core: Callable[..., jax.Array] = dense_attention
    """The attention core, of `jaxpar.attention`."""
    attention: Callable[..., jax.Array] = call
    """(`core`, q, k, v, factor=...) -> (B, T, H, D)."""
    local_rows: Callable[[jax.Array, int], jax.Array] = lambda table, length: table[:length]
    """(a table with a row for each position, T) -> rows of the local positions (T, ...)."""
    # Dropout's random bits depend on the global indices of an element.
    heads: Indices = jnp.arange
    """Heads in attention."""
    query_positions: Indices = jnp.arange
    """Positions of queries in attention."""
    stream_positions: Indices = jnp.arange
    """Positions of the residual stream, between the regions of tensor parallelism."""

    look_up: Callable[[jax.Array, jax.Array], jax.Array] = operator.getitem
    """(table of tokens (V, C), tokens (B, T)) -> (B, T, C)."""
    position_vectors: Callable[[jax.Array, jax.Array], jax.Array] = lambda table, x: table[: x.shape[1]]
    """(table of positions, x (B, T, C)) -> the vectors (T, C), or (B, T, C), that are added to x."""
    after_embedding: Hook = identity
    before_logits: Hook = identity
    vocabulary: Indices | None = None
    """Token ids of the logits, under tensor parallelism: ids that are padding get a logit of -inf."""
    cross_entropy: Callable[[jax.Array, jax.Array], jax.Array] = cross_entropy
    """(logits (B, T, V), targets (B, T)) -> mean loss."""

    experts: Callable[[Any, jax.Array, jax.Array], jax.Array] = lambda experts, *x: experts.mix(*x)
    """(`mlp.Experts`, x (B, T, C), weights (B, T, E)) -> (B, T, C)."""
    before_mix: Hook = identity
    """The weights of the experts' outputs, at the experts."""
    sum_tokens: Hook = lambda x_BTE: x_BTE.sum(axis=(0, 1), dtype=x_BTE.dtype)
    """Sums (E,) over tokens."""
    sum_counts: Hook = identity
    """How often each expert was chosen, (L, E), by the local tokens -> by all tokens."""
    mean_probability: Hook = identity
    """Sums over tokens of each expert's probability, (L, E), on this device -> their mean over devices."""

    gather_layer: Callable[[Any, jax.Array], Any] = lambda layer, x_BTC: layer
    """(stored parameters of a layer, x) -> full parameters; called in the scan over layers."""
    remat: Remat = "none"
    is_gather: IsGather | None = None
    keep_gathered: bool = False
    """Arguments of `remat.apply_remat`, for a layer of the scan."""
