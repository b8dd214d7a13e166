"""Context parallelism by the compiler: positions of the batch are split, and attention constrains q, k and v.

    context      q                     k, v                  result of attention
    allgather    P(B, cp, tp)          P(B, None, tp)        P(B, cp, tp)
    ulysses      P(B, None, (tp, cp))  P(B, None, (tp, cp))  P(B, None, (tp, cp)), then P(B, cp, tp)

    context      communication that XLA inserts
    allgather    all-gathers of k and v before attention, again in backward (layout.remat = dots); all-reduces
                 of their gradients in backward, and a slice
    ulysses      all-to-alls of q, k and v from positions to heads before attention, and back after it; the
                 inverse four in backward, for gradients (layout.remat = dots repeats the first four)

All other layers act on single positions, so the split of the batch is enough for them. Under jit positions
are global, and the causal mask is, too. With zigzag a device has two chunks, one from each end of the
sequence, so that the causal mask gives all devices the same work. The batch is then permuted, and its
positions are set explicitly.

A constraint gives the layout of an array, not an order in time. A ring needs an order: a device multiplies
one block while the next block arrives. The compiler engine therefore has no ring.

Both ends of attention are constrained. With a constraint on the result alone, backward of ulysses exchanges
the attention weights (T, T). The inputs are constrained to positions first. Without this constraint XLA may
gather the residual stream and repeat the projections on each device.

Legend: B batch, T position, H heads, D head_dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from compare.numerics.context import order_of_positions
from compare.spec.axes import CP, PP, TP
from compare.spec.experiment import Experiment
from jaxpar.attention import attention_core, call
from jaxpar.hooks import Hooks

AXIS = CP
B = P.UNCONSTRAINED  # data parallelism splits the batch
POSITIONS, WHOLE, HEADS = P(B, AXIS, TP), P(B, None, TP), P(B, None, (TP, AXIS))
"""Specs of (B, T, H, D): some positions, as outside attention; all positions; some heads, all positions."""
WANTED = {"allgather": (POSITIONS, WHOLE, WHOLE), "ulysses": (HEADS, HEADS, HEADS)}
"""Specs of q, k and v inside attention."""


def split_sequence(hooks: Hooks, experiment: Experiment, *, mapped: tuple[str, ...]) -> None:
    """Constrain the arrays of attention; under zigzag set the global positions of the permuted batch.

    `mapped` are the axes of the `vmap` over replicas that calls the model.
    """
    layout, positions = experiment.layout, None
    axes = {AXIS, *mapped, *((PP,) if layout.pp > 1 else ())}
    per_device = call if layout.context == "ulysses" else partial(attend_per_device, axes)
    hooks.core = attention_core(experiment, per_device)
    if layout.zigzag:
        order_T = order_of_positions(experiment.model.block_size, layout)
        hooks.local_rows = hooks.position_vectors = lambda table, _: table[order_T]
        hooks.query_positions = hooks.stream_positions = lambda count: order_T
        positions = order_T, order_T
    hooks.attention = partial(constrained_attention, wanted=WANTED[layout.context], positions=positions)


def attend_per_device(axes: set[str], compute: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """compute(q, k, v and their positions) with this device's queries, and all keys.

    A loop over blocks runs over positions, of which a device has its own. One loop for all devices would
    compute hidden blocks, too. So this part of the program is a `shard_map` over cp. `axes` are cp and the
    axes of each `vmap` around it, whose dim JAX adds to the specs. check_vma is off: constants do not vary
    along the axes of a `vmap`.
    """
    specs = P(None, AXIS), P(), P(), P(AXIS), P()
    # Nothing is sent. Backward all-reduces the gradients of k and v.
    shard_map = partial(jax.shard_map, axis_names=axes, in_specs=specs, out_specs=P(None, AXIS))
    return shard_map(compute, check_vma=False)(*arrays)


def constrained_attention(
    attention: Callable[..., jax.Array], *qkv: jax.Array, wanted: tuple[P, P, P], **options: Any
) -> jax.Array:
    """Attention over q, k and v (B, T, H, D) with the specs `wanted`; the result is split by positions."""
    constrain = lax.with_sharding_constraint
    by_positions = (constrain(x, POSITIONS) for x in qkv)
    # XLA all-gathers k and v, or exchanges positions for heads by an all-to-all of each of q, k and v.
    y_BTHD = constrain(attention(*map(constrain, by_positions, wanted), **options), wanted[0])
    # ulysses: one all-to-all from heads back to positions. allgather: nothing is sent.
    return constrain(y_BTHD, POSITIONS)
