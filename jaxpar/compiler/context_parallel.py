"""Context parallelism by the compiler: a batch whose positions are split, and what attention wants of them.

    context     q                k, v                what attention makes
    allgather   P(B, cp, tp)     P(B, None, tp)      P(B, cp, tp)
    ulysses     P(B, None, (tp, cp)): some heads     the same, and then P(B, cp, tp)

All else works on one position at a time: that the batch is split is all it takes. Under jit positions are
global, and so is the causal mask; but zigzag permutes a sequence before it is cut, and says so. A ring cannot
be asked for: it is an order in time, which block is multiplied while the next is on its way, and a constraint
says only where an array lives.

Without any constraint XLA (of jax 0.10.2, on a CPU) gathers keys and values as well, and the bytes are those
of allgather; told that they are whole, it may keep them for backward (layout.remat = none). Heads for
positions it never finds, and it has to be told of both ends: told where the result goes alone, backward
exchanges the weights of attention, which are (T, T). And of where q, k and v come from, by positions: else it
may gather the stream, and multiply all of it, as with RoPE and grouped queries.

Legend: B batch, T position, H heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from compare.numerics.context import order_of_positions
from compare.spec.axes import CP, TP
from compare.spec.experiment import Experiment
from jaxpar.hooks import Hooks

AXIS = CP
B = P.UNCONSTRAINED  # the batch is data parallelism's affair
POSITIONS, WHOLE, HEADS = P(B, AXIS, TP), P(B, None, TP), P(B, None, (TP, AXIS))
"""Of (B, T, H, D): by positions, as all but attention has them; all positions; and of those some heads."""
WANTED = {"allgather": (POSITIONS, WHOLE, WHOLE), "ulysses": (HEADS, HEADS, HEADS)}
"""Where q, k and v live in attention."""


def split_sequence(hooks: Hooks, experiment: Experiment) -> None:
    """Constrain attention's arrays; under zigzag give the positions that the batch has."""
    layout, positions = experiment.layout, None
    if layout.zigzag:
        order_T = order_of_positions(experiment.model.block_size, layout)
        hooks.local_rows = lambda table, length: table[order_T]
        hooks.query_positions = hooks.stream_positions = lambda count: order_T
        positions = order_T, order_T
    hooks.attention = partial(constrained_attention, wanted=WANTED[layout.context], positions=positions)


def constrained_attention(
    attention: Callable[..., jax.Array], *qkv: jax.Array, wanted: tuple[P, P, P], **options: Any
) -> jax.Array:
    """Attention over q, k and v where they are `wanted`; its result is split by positions again."""

    constrain = lax.with_sharding_constraint
    by_positions = (constrain(x, POSITIONS) for x in qkv)
    y_BTHD = constrain(attention(*map(constrain, by_positions, wanted), **options), wanted[0])
    return constrain(y_BTHD, POSITIONS)
