"""Context parallelism by hand: each device has some of the positions, and its queries see the keys of all.

    context      forward                              backward
    allgather    all-gather K, V                      reduce-scatter dK, dV
    ulysses      all-to-all q, k, v and then y        all-to-all their gradients
    ring         n - 1 hops of K, V                   n - 1 hops of K, V, and n hops of dK, dV

In a hop a device sends the K, V that it has to the next device, and attends to them meanwhile. All hops are
in `ring`: `pass_around` sends K, V, and backward sends dK, dV. Each query keeps a softmax over the keys so
far. A new block is merged by its share of the sum of exponentials, so the order of the blocks does not
matter. After n - 1 hops every query has seen all keys, and no device has gathered them. In backward dK, dV
follow their K, V: each device adds its part, and after n hops they are back.

Autodiff derives the backward of the first two. Under layout.remat = dots, the default, backward also gathers
K and V again. All other layers treat each position by itself, and send nothing. Weights are replicated over
cp, and their gradients are means over cp as over replicas.

A device has one chunk of neighbouring positions. With zigzag it has two, one from each end of the sequence,
so that the causal mask gives all devices the same work.

Legend: n devices of cp, B batch, T all positions, t this device's positions, H heads, h this device's heads,
D head_dim.
Sources: Llama 3 (arXiv 2407.21783, section 3.3.2), DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compare.contract.communication import ACTIVATIONS
from compare.numerics.context import order_of_positions
from compare.spec.axes import CP
from compare.spec.experiment import Experiment
from jaxpar.comm import collectives
from jaxpar.hooks import Hooks
from jaxpar.manual.ring import ring_attention
from jaxpar.manual.strategy import Strategy

AXIS = CP
POSITION_DIM, HEADS_DIM = 1, 2
"""Dims of (B, T, H, D)."""


def strategy(experiment: Experiment, placements: Any, hooks: Hooks) -> Strategy:
    """Set the layout's attention, and the positions of this device."""
    layout = experiment.layout
    if layout.cp == 1:
        return Strategy()
    order_T = order_of_positions(experiment.model.block_size, layout)
    own, of_stream = partial(local_positions, order_T), hooks.stream_positions
    hooks.local_rows = lambda table, length: table[own(length)]
    hooks.position_vectors = lambda table, x: table[hooks.stream_positions(x.shape[1])]
    hooks.stream_positions = lambda count: own(count)[of_stream(count)]  # tp may split them again
    if layout.context == "ring":
        # The messages are in `ring`: in `pass_around`, and in the backward.
        hooks.attention = partial(ring_attention, layout=layout)
    elif layout.context == "ulysses":
        hooks.attention = exchanged_attention
        hooks.heads = partial(collectives.local_indices, axis=AXIS, of=hooks.heads)
    else:
        hooks.attention, hooks.query_positions = partial(gathered_attention, order_T=order_T), own
    return Strategy()


def local_positions(order_T: np.ndarray, count: int) -> jax.Array:
    """Positions of this device's tokens in the sequence, (t,); `count` is t."""
    return collectives.local_shard(jnp.asarray(order_T), AXIS, dim=0)


def gathered_attention(
    core: Callable[..., jax.Array], q_BtHD: jax.Array, *kv: jax.Array, order_T: np.ndarray, factor: Any
) -> jax.Array:
    """Attention (B, t, H, D) of this device's queries to the gathered keys and values of all positions."""
    gather = partial(collectives.all_gather, axis=AXIS, dim=POSITION_DIM, purpose=ACTIVATIONS)
    positions = local_positions(order_T, q_BtHD.shape[1]), order_T
    # All-gather K, then V. In backward reduce-scatter dK and dV.
    k_BTHD, v_BTHD = map(gather, kv)
    return core(q_BtHD, k_BTHD, v_BTHD, positions=positions, factor=factor)


def exchanged_attention(core: Callable[..., jax.Array], *qkv: jax.Array, factor: Any) -> jax.Array:
    """Attention to all positions with some of the heads: q, k, v (B, t, H, D) to y (B, t, H, D)."""
    exchange = partial(collectives.all_to_all, axis=AXIS, purpose=ACTIVATIONS)
    # Send every other device its heads of q, k and v, and receive the positions of this device's heads.
    q_BThD, k_BThD, v_BThD = (exchange(x, split=HEADS_DIM, joined=POSITION_DIM) for x in qkv)
    y_BThD = core(q_BThD, k_BThD, v_BThD, factor=factor)
    # Return the positions of each device, and receive all heads of this device's positions.
    return exchange(y_BThD, split=POSITION_DIM, joined=HEADS_DIM)
