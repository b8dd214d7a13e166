"""Context parallelism in types: positions are a split dim, and attention casts what it needs of the others.

    context     casts of q, k, v [B, T@cp, H, D]                    backward
    allgather   k, v -> {R:cp}: all-gather                          {U:cp} -> [T@cp]: reduce-scatter
    ulysses     q, k, v -> [B, T, H@cp, D]: all-to-all; y back      the same casts in reverse

Under layout.remat = dots, the default, backward gathers k and v again. XLA on a CPU makes no reduce-scatter
of a cast: it all-reduces and takes a slice.

[T@cp]: cp splits T. {R:cp}: equal on all devices of cp; its gradient is {U:cp}, a partial sum on each device.

A product of q [T@cp] and k [S@cp] would have cp twice, which is an error. All other operations of a GPT work
on one position at a time. A ring has no type: a type gives the place of an array, and a ring is an order in
time.

Legend: B batch, T and S position, H heads, D head_dim, C n_embd.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.contract.communication import ACTIVATIONS
from compare.numerics.context import order_of_positions
from compare.spec.axes import CP, TP
from compare.spec.experiment import Experiment
from jaxpar.comm.collectives import ledger_scope
from jaxpar.explicit.sharding_types import axes_of_dims
from jaxpar.hooks import Hooks

AXIS = CP
Attention = Callable[..., jax.Array]


def split_sequence(hooks: Hooks, experiment: Experiment) -> None:
    """Cast in attention, and give positions the order of the batch, split as x is."""
    layout = experiment.layout
    order_T = order_of_positions(experiment.model.block_size, layout)

    def position_vectors(table_TC: jax.Array, x_BTC: jax.Array) -> jax.Array:
        rows, positions, _ = axes_of_dims(x_BTC)
        index_BT = jnp.broadcast_to(order_T, x_BTC.shape[:2], out_sharding=P(rows, positions))
        return hooks.look_up(table_TC, index_BT)

    hooks.position_vectors = position_vectors
    hooks.local_rows = lambda table, length: table[order_T]
    split_T = (AXIS, TP) if layout.sequence_parallel else AXIS
    hooks.stream_positions = lambda count: reshard(order_T, P(split_T))
    if layout.context == "ulysses":
        hooks.attention = exchanged_attention
        hooks.heads = lambda count: reshard(jnp.arange(count), P((TP, AXIS)))
    else:
        hooks.attention = partial(gathered_attention, order_T=order_T)
        hooks.query_positions = lambda count: reshard(order_T, P(AXIS))


def gathered_attention(
    attention: Attention, q_BTHD: jax.Array, *kv: jax.Array, order_T: np.ndarray, factor: Any
) -> jax.Array:
    """Attention of the queries [T@cp] to all keys."""
    rows, _, heads, _ = axes_of_dims(kv[0])
    with ledger_scope(ACTIVATIONS):
        # All-gather k and v; their gradients {U:cp} are reduce-scattered.
        k_BSHD, v_BSHD = (reshard(x, P(rows, None, heads, reduced={AXIS})) for x in kv)
        return attention(q_BTHD, k_BSHD, v_BSHD, positions=(order_T, order_T), factor=factor)


def exchanged_attention(attention: Attention, *qkv: jax.Array, factor: Any) -> jax.Array:
    """Attention over all positions in heads [H@cp]."""
    rows, _, _, _ = axes_of_dims(qkv[0])
    by_heads, by_positions = P(rows, None, (TP, AXIS)), P(rows, AXIS, TP)
    with ledger_scope(ACTIVATIONS):
        # All-to-all: each device gets some heads of all positions.
        q_BTHD, k_BTHD, v_BTHD = (reshard(x, by_heads) for x in qkv)
        y_BTHD = attention(q_BTHD, k_BTHD, v_BTHD, factor=factor)
        # All-to-all: each device gets all heads of its positions back.
        return reshard(y_BTHD, by_positions)
