"""Expert parallelism by hand: each device of ep has some of every layer's experts, and tokens go to them.

    dispatch    all_to_all    a token goes to each device that has experts of its choice, with their weights
    compute     -             the experts here, on the tokens of all devices
    combine     all_to_all    their weighted sum goes back, and is added to that of the other devices

An all_to_all is its own transpose: backward combines, then dispatches. So the gradient of an expert is a sum
over the rows of all of ep: it is reduced over the other axes of data, and its mean divides it by all of them.

How many tokens a device gets is data, and shapes are not: `ragged_all_to_all`, which would send k of n parts
or fewer, XLA has on GPUs and TPUs alone. Here a device has room for all tokens of each other one, and zeros
lie where a token stays away: nothing is dropped, and what is sent does not depend on the router.

Legend: n devices of ep, N tokens of this device, E experts, C embedding.
Sources: GShard (arXiv 2006.16668); a token once to each device: DeepSeek-V3 (2412.19437, section 3.2.2).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from compare.contract.communication import ACTIVATIONS, LOSS, ROUTING
from compare.spec.axes import DATA, EP, TP
from compare.spec.experiment import Experiment
from jaxpar.comm import collectives
from jaxpar.hooks import Hooks
from jaxpar.manual.strategy import Strategy
from jaxpar.mlp import Experts

AXIS = EP
exchange = partial(collectives.all_to_all, axis=AXIS, split=0, joined=0, purpose=ACTIVATIONS)


def strategy(experiment: Experiment, placements: Any, hooks: Hooks) -> Strategy:
    """Tokens go to their experts; the load-balance loss is of the tokens of all devices."""
    layout = experiment.layout
    if not experiment.model.n_experts:
        return Strategy()

    if layout.ep > 1:
        hooks.experts = at_their_experts
    tokens = (*DATA, TP) if layout.sequence_parallel else DATA  # the axes whose devices have others
    hooks.sum_counts = partial(collectives.all_reduce, axis=tokens, purpose=ROUTING)
    if layout.sequence_parallel:
        hooks.mean_probability = lambda p_LE: (
            collectives.all_reduce(p_LE, TP, purpose=LOSS) / collectives.axis_size(TP)
        )
    return Strategy()


def at_their_experts(experts: Experts, x_BTC: jax.Array, weights_BTE: jax.Array) -> jax.Array:
    """The weighted sum (B, T, C) of all experts' outputs, from the devices that have them."""
    x_NC = x_BTC.reshape(-1, x_BTC.shape[-1]).astype(experts.up.compute)
    weights_nNE = weights_BTE.reshape(len(x_NC), collectives.axis_size(AXIS), -1).swapaxes(0, 1)
    x_nNC = jnp.where((weights_nNE > 0).any(axis=-1, keepdims=True), x_NC, 0)
    y_nNC = experts.mix(exchange(x_nNC), exchange(weights_nNE))
    return exchange(y_nNC).astype(x_BTC.dtype).sum(axis=0).reshape(x_BTC.shape)
