"""What a block has behind its attention: nanoGPT's MLP, or experts, among which a router chooses.

B batch, T position, C n_embd, M features inside of an MLP, L layers, E experts, of which a token has k.
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
"""The scope of what experts compute, and of where tokens go for it."""


class MLP(nnx.Module):
    """Up to M, an activation, down to C."""

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
    """Mean probability of each expert, (E,); the softmax is over all experts."""
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
    """MLPs of which a router chooses k for each token: those of the largest logits, of equal ones the first.

    Every expert computes every token, and weighs 0 where it was not chosen: so shapes do not depend on data,
    at E / k times the work. XLA on a CPU makes as much of `lax.ragged_dot`.
    """

    def __init__(self, config: Model, dtypes: Dtypes, hooks: Hooks):
        width, inner, experts = config.n_embd, MLP_RATIO * config.n_embd, config.n_experts
        self.router = Linear((width,), (experts,), bias=False, dtypes=dtypes)
        self.router.compute = dtypes.storage  # in 16 bits many logits would be equal
        self.up = UpToEach((experts, width), (inner,), bias=False, dtypes=dtypes, hooks=hooks.up)
        self.down = Linear((experts, inner), (width,), bias=False, dtypes=dtypes, hooks=hooks.down)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout, DropoutSite.MLP_OUT, positions=hooks.stream_positions)
        self.chosen, self.hooks = config.experts_per_token, hooks

    def __call__(self, x_BTC: jax.Array, noise: Noise | None = None) -> tuple[jax.Array, RouterOutput]:
        with jax.named_scope(f"{KEEPS}router"):
            logits_BTE = self.router(x_BTC)
        # Not `lax.top_k`: XLA does not divide what it makes of it, and gathers the whole batch.
        ranked_BTE = jnp.argsort(lax.stop_gradient(-logits_BTE), axis=-1).astype(jnp.int32)
        chosen_BTk = jnp.sort(ranked_BTE[..., : self.chosen], axis=-1)
        is_chosen_BTE = (chosen_BTk[..., None] == jnp.arange(logits_BTE.shape[-1])).any(axis=-2)
        weights_BTE = self.weights(logits_BTE, is_chosen_BTE)
        with jax.named_scope(EXPERTS):
            y_BTC = self.hooks.experts(self, x_BTC, weights_BTE)
        probability_E = jax.nn.softmax(logits_BTE, axis=-1).mean(axis=(0, 1))
        count_E = is_chosen_BTE.sum(axis=(0, 1), dtype=jnp.int32)
        return self.dropout(y_BTC, noise), RouterOutput(probability_E, count_E, chosen_BTk)

    def weights(self, logits_BTE: jax.Array, is_chosen_BTE: jax.Array) -> jax.Array:
        """A softmax over the logits of the chosen; 0 for the others."""
        return jax.nn.softmax(jnp.where(is_chosen_BTE, logits_BTE, -jnp.inf), axis=-1)

    def mix(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """The sum of all experts' outputs on x (.., C), times their weights (.., E): (.., C)."""
        hidden = self.activation(self.up(x))  # (.., E, M)
        return self.down(hidden * self.hooks.before_mix(weights)[..., None])
