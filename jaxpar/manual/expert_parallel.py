"""Expert parallelism by hand: each device of ep has some of each layer's experts, and tokens travel to them.

    step        communication    arrays
    dispatch    all-to-all       tokens and routing weights, to each device with an expert of the token
    compute     none             local experts, on the tokens of all devices of ep
    combine     all-to-all       weighted outputs, back to the device of the token, which adds them

The transpose of an all-to-all is an all-to-all in the opposite direction, so autodiff writes backward. The
gradient of an expert is therefore a sum over the rows of all of ep. It is reduced over the other data axes
alone, and divided by the size of all data axes.

Shapes are static, and the number of tokens for a device depends on data. A device has room for all tokens of
each other device, and unsent tokens are zeros. No token is dropped, and the bytes do not depend on the
router. `ragged_all_to_all` would send the chosen tokens alone, on GPUs and TPUs only.

Legend: n devices of ep, B batch, T position, N = B T local tokens, E experts, C n_embd.
Sources: GShard (arXiv 2006.16668); one copy for each device: DeepSeek-V3 (2412.19437, section 3.2.2).
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
    """Send tokens to their experts; compute the load-balance loss over the tokens of all devices."""
    layout = experiment.layout
    if not experiment.model.n_experts:
        return Strategy()

    if layout.ep > 1:
        hooks.experts = dispatch_compute_combine
    tokens = (*DATA, TP) if layout.sequence_parallel else DATA  # axes whose devices have different tokens
    # All-reduce the counts of chosen experts for the load-balance loss.
    hooks.sum_counts = partial(collectives.all_reduce, axis=tokens, purpose=ROUTING)
    if layout.sequence_parallel:
        # Each device of tp routes some positions: all-reduce the mean probabilities.
        hooks.mean_probability = lambda p_LE: (
            collectives.all_reduce(p_LE, TP, purpose=LOSS) / collectives.axis_size(TP)
        )
    return Strategy()


def dispatch_compute_combine(experts: Experts, x_BTC: jax.Array, weights_BTE: jax.Array) -> jax.Array:
    """Weighted sum (B, T, C) of the outputs of all experts, which are on the devices of ep."""
    x_NC = x_BTC.reshape(-1, x_BTC.shape[-1]).astype(experts.up.compute)
    weights_nNE = weights_BTE.reshape(len(x_NC), collectives.axis_size(AXIS), -1).swapaxes(0, 1)
    # One copy of a token for each device; zeros where the token chose no expert of that device.
    x_nNC = jnp.where((weights_nNE > 0).any(axis=-1, keepdims=True), x_NC, 0)
    # Dispatch: two all-to-alls, of tokens and of weights. Then the local experts compute.
    y_nNC = experts.mix(exchange(x_nNC), exchange(weights_nNE))
    # Combine: one all-to-all returns the outputs, one for each device. Their sum is the result.
    return exchange(y_nNC).astype(x_BTC.dtype).sum(axis=0).reshape(x_BTC.shape)
