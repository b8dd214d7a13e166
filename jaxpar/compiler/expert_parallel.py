"""Expert parallelism by the compiler: say that experts are split, and where their tokens are.

    weights    [E@ep, ...]                  by the table of axes
    x          [rows] of all ep's devices   XLA gathers them
    inside     [rows, E@ep, M@tp]           the experts here; of a token without any the weights are 0
    y          [rows@ep]                    a sum over ep, scattered: on a CPU XLA reduces, and takes a slice

That is no all-to-all. But in static shapes, with room for all tokens, an all-to-all (jax-explicit) sends as
much. What XLA (of jax 0.10.2, on a CPU) makes of the experiment `experts` on 2 devices of ep, MB a step:

    1.90    as here; of it 0.98 gathers tokens
    2.24    nothing said but where weights live: it gathers, and takes pieces of activations to and fro
    2.77    experts inside of it are said, and not where tokens are: the same, and more is gathered
    7.73    one-hot dispatch, each expert with room for all tokens, two constraints around it: all_to_all
    1.54    jax-explicit and jax-manual, which also reduce gradients once a step, and not in each pass

Sources: GSPMD (arXiv 2105.04663); one-hot dispatch: GShard (2006.16668, section 3.2).

Legend: D groups of devices that have all experts together, n devices of ep in each, b rows of one device; T
position, E experts, M features inside of one.
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
D = P.UNCONSTRAINED  # the axes of data beside ep
ALL_TOKENS, INSIDE = P(D, None, None, CP), P(D, None, None, CP, AXIS, TP)
"""Of (D, n, b, T, C), and of (D, n, b, T, E, M)."""


def shard_experts(hooks: Hooks, experiment: Experiment) -> None:
    """Constrain the experts' tokens, and what experts make of them."""
    layout, rows = experiment.layout, experiment.train.batch_size // experiment.layout.data_parallel
    own_tokens = P(D, AXIS, None, (CP, TP) if layout.sequence_parallel else CP)

    def exchange(experts: Experts, x_BTC: jax.Array, weights_BTE: jax.Array) -> jax.Array:
        tokens = x_BTC.astype(experts.up.compute), weights_BTE
        return experts.mix(*(x.reshape(-1, layout.ep, rows, *x.shape[1:]) for x in tokens)).reshape(
            x_BTC.shape
        )

    hooks.experts = exchange
    hooks.up.before = hooks.before_mix = partial(lax.with_sharding_constraint, shardings=ALL_TOKENS)
    hooks.up.after = hooks.down.before = partial(lax.with_sharding_constraint, shardings=INSIDE)
    hooks.down.after = partial(lax.with_sharding_constraint, shardings=own_tokens)
