"""Expert parallelism by the compiler: constrain the experts and their tokens, and XLA gathers and reduces.

    array            spec                   communication that XLA inserts
    weights          [E@ep, ...]            none; the table of axes (`compare.spec.axes`) places them
    tokens x         rows of all ep         all-gather over ep
    hidden           E@ep, M@tp             none: each device computes its own experts on all tokens
    output y         rows@ep                a sum over ep: reduce-scatter, on a CPU an all-reduce and a slice

`Experts.mix` multiplies by `up`, applies the activation and the routing weights, and multiplies by `down`,
which sums over E and M. ep splits E, so each device has a partial sum of every token, over its own experts.
The routing weight of a token is 0 at each expert that the token did not choose.

Shapes are static, so an all-to-all needs room for all tokens on each device and sends as many bytes, as in
jax-explicit. The one-hot dispatch of GShard sends more. Without these constraints XLA sends nearly the same.

Legend: D groups of n devices along ep, b rows of a device; T position, C n_embd, E experts, M inner features.
Sources: GSPMD (arXiv 2105.04663); one-hot dispatch: GShard (arXiv 2006.16668, section 3.2).
"""

from functools import partial

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from compare.spec.axes import CP, EP, TP
from compare.spec.experiment import Experiment
from jaxpar.hooks import Hooks
from jaxpar.mlp import Experts

AXIS = EP
OTHERS = P.UNCONSTRAINED  # the data axes other than ep
ALL_TOKENS, INSIDE = P(OTHERS, None, None, CP), P(OTHERS, None, None, CP, AXIS, TP)
"""Specs of tokens (D, n, b, T, C) and of hidden features (D, n, b, T, E, M)."""


def shard_experts(hooks: Hooks, experiment: Experiment) -> None:
    """Set hooks that constrain the tokens, hidden features and outputs of the experts."""
    layout, rows = experiment.layout, experiment.train.batch_size // experiment.layout.data_parallel
    own_tokens = P(OTHERS, AXIS, None, (CP, TP) if layout.sequence_parallel else CP)

    def exchange(experts: Experts, x_BTC: jax.Array, weights_BTE: jax.Array) -> jax.Array:
        """Compute the experts with rows as (D, n, b), so that ep is a dim that constraints can name."""
        tokens = x_BTC.astype(experts.up.compute), weights_BTE
        return experts.mix(*(x.reshape(-1, layout.ep, rows, *x.shape[1:]) for x in tokens)).reshape(
            x_BTC.shape
        )

    hooks.experts = exchange
    # All-gather tokens and routing weights over ep; backward reduces their gradients.
    hooks.up.before = hooks.before_mix = partial(lax.with_sharding_constraint, shardings=ALL_TOKENS)
    # Each device computes its own experts. Nothing is sent.
    hooks.up.after = hooks.down.before = partial(lax.with_sharding_constraint, shardings=INSIDE)
    # `down` leaves a partial sum of all tokens on each device of ep: XLA adds them, and each device keeps its
    # own rows. Backward all-gathers the gradients of the rows, as each expert needs every token's gradient.
    hooks.down.after = partial(lax.with_sharding_constraint, shardings=own_tokens)
