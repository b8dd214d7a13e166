"""The second half of a block: nanoGPT's MLP, or experts with a router.

B batch, T position, C n_embd, M inner features of an MLP, L layers, E experts, k chosen experts of a token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from compare.numerics.dropout import DropoutSite
from compare.numerics.parameters import MLP_RATIO
from compare.spec.experiment import Model
from jaxpar.dropout import Dropout, Noise
from jaxpar.functional import ACTIVATIONS, KEEPS
from jaxpar.hooks import Hooks
from jaxpar.linear import Dtypes, Linear

EXPERTS = "experts"
"""Name scope of the experts: the exchange of tokens and the computation."""


class MLP(nnx.Module):
    """Linear map from C to M, activation, linear map from M to C."""

    def __init__(self, config: Model, dtypes: Dtypes, hooks: Hooks):
        width, hidden = (config.n_embd,), (MLP_RATIO * config.n_embd,)
        self.up = Linear(width, hidden, bias=config.bias, dtypes=dtypes, hooks=hooks.up)
        self.down = Linear(hidden, width, bias=config.bias, dtypes=dtypes, hooks=hooks.down)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout, DropoutSite.MLP_OUT, positions=hooks.stream_positions)

    def __call__(self, x_BTC: jax.Array, noise: Noise | None = None) -> tuple[jax.Array, None]:
        return self.dropout(self.down(self.activation(self.up(x_BTC))), noise), None


class RouterOutput(NamedTuple):
    """Routing of one layer, or of L layers with a leading dim L."""

    probability: jax.Array
    """Sum over tokens of the probability of each expert, (E,); the softmax is over all experts."""
    count: jax.Array
    """Number of tokens that chose each expert, int32 (E,)."""
    chosen: jax.Array
    """Expert ids of each token, int32 (B, T, k), in ascending order."""


class Routing(NamedTuple):
    """Routing of one pass, in int32. Both fields are None without experts."""

    expert_ids: Any = None
    """Expert ids of each token, (L, B, T, k)."""
    tokens_per_expert: Any = None
    """Number of tokens of the pass that chose each expert, (L, E)."""


class UpToEach(Linear):
    """The linear map of every expert, from x (..., C) by a weight (E, C, M) to (..., E, M)."""

    def product(self, x: jax.Array) -> jax.Array:
        weight_CEM = self.weight[...].astype(self.compute).swapaxes(0, 1)
        return self.hooks.matmul(x.astype(self.compute), weight_CEM, 1)


class Experts(nnx.Module):
    """MLPs, of which a router chooses the k with the largest logits for each token.

    Among equal logits the router prefers the lower expert id. Each expert computes each token, with weight 0
    if it was not chosen. So shapes are static, at E / k times the work. `lax.ragged_dot` costs the same on a
    CPU.
    """

    def __init__(self, config: Model, dtypes: Dtypes, hooks: Hooks):
        width, inner, experts = config.n_embd, MLP_RATIO * config.n_embd, config.n_experts
        self.router = Linear((width,), (experts,), bias=False, dtypes=dtypes, hooks=hooks.router)
        self.router.compute = dtypes.storage  # in 16 bits many logits would be equal
        self.up = UpToEach((experts, width), (inner,), bias=False, dtypes=dtypes, hooks=hooks.up)
        self.down = Linear((experts, inner), (width,), bias=False, dtypes=dtypes, hooks=hooks.down)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout, DropoutSite.MLP_OUT, positions=hooks.stream_positions)
        self.chosen, self.hooks = config.experts_per_token, hooks

    def __call__(self, x_BTC: jax.Array, noise: Noise | None = None) -> tuple[jax.Array, RouterOutput]:
        with jax.named_scope(f"{KEEPS}router"):
            logits_BTE = self.router(x_BTC)
            probability_E = self.hooks.sum_tokens(jax.nn.softmax(logits_BTE, axis=-1))
        # Not `lax.top_k`: XLA does not partition it and would gather the logits of the whole batch.
        ranked_BTE = jnp.argsort(lax.stop_gradient(-logits_BTE), axis=-1).astype(jnp.int32)
        chosen_BTk = jnp.sort(ranked_BTE[..., : self.chosen], axis=-1)
        is_chosen_BTE = (chosen_BTk[..., None] == jnp.arange(logits_BTE.shape[-1])).any(axis=-2)
        with jax.named_scope(f"{KEEPS}router"):
            weights_BTE = self.weights(logits_BTE, is_chosen_BTE)
        with jax.named_scope(EXPERTS):
            y_BTC = self.hooks.experts(self, x_BTC, weights_BTE)
        count_E = self.hooks.sum_tokens(is_chosen_BTE.astype(jnp.int32))
        return self.dropout(y_BTC, noise), RouterOutput(probability_E, count_E, chosen_BTk)

    def weights(self, logits_BTE: jax.Array, is_chosen_BTE: jax.Array) -> jax.Array:
        """Softmax (B, T, E) over the logits of the chosen experts; 0 for all other experts."""
        return jax.nn.softmax(jnp.where(is_chosen_BTE, logits_BTE, -jnp.inf), axis=-1)

    def mix(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Sum (.., C) of the outputs of all experts on x (.., C), times the weights (.., E)."""
        hidden = self.activation(self.up(x))  # (.., E, M)
        return self.down(hidden * self.hooks.before_mix(weights)[..., None])
