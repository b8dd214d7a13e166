"""Ring attention by hand: K and V pass from device to device, and no device gathers them.

    hop          compute                                        meanwhile
    forward      attention to the K, V that are here            K, V to the next device
    backward     gradients of the K, V that are here            K, V to the next device, then dK, dV

After n - 1 hops every query has seen the keys of all n devices. In backward dK and dV follow their K and V
through all devices, each of which adds its part. After n hops they are back at their own device.

A hop computes one block: all queries of this device against all keys of another. If the keys come first, the
causal mask hides nothing. If both are the same positions, it leaves a triangle. If the keys come later, it
hides the whole block, and a `lax.cond` skips it. So the last device has the most work. Zigzag, at the end of
this file, divides it evenly.

Softmax over blocks: a query's state is the largest score so far, the sum of exponentials relative to it, and
the sum of values weighted by them. Autodiff would save the weights of every block. So backward is written by
hand: it computes a block's weights again, from its scores and the logarithm of the sum over all blocks.

Legend: B batch, t this device's positions, c positions of a block, n devices.
K heads of keys and values, G query heads of each, D head_dim.
Sums, and the gradients that pass around, are in float32 at least.
Source: Ring Attention (arXiv 2310.01889).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.spec.axes import CP
from compare.spec.experiment import Layout
from jaxpar.comm import collectives
from jaxpar.functional import KEEPS
from jaxpar.remat import KEPT_BY_DOTS

AXIS = CP
Block = tuple[slice, slice, jax.Array, jax.Array]
"""Places of its queries and of its keys; whether any key is visible; whether both are the same positions."""
Blocks = Callable[[jax.Array, jax.Array], Iterable[Block]]
"""(rank of the queries, rank of the keys) -> the blocks of a hop."""
send_to_next = partial(collectives.shift, axis=AXIS, by=1)


def plain_blocks(rank: jax.Array, source: jax.Array) -> Iterator[Block]:
    """The block of a hop. Keys of later ranks are hidden."""
    yield slice(None), slice(None), source <= rank, source == rank


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def ring(q_BKGtD: jax.Array, kv_2BKtD: jax.Array, blocks: Blocks) -> jax.Array:
    """Attention of this device's queries to the keys of all devices, one device's at a time."""
    return ring_forward(q_BKGtD, kv_2BKtD, blocks)[0]


def ring_forward(q_BKGtD: jax.Array, kv_2BKtD: jax.Array, blocks: Blocks) -> tuple[jax.Array, Any]:
    """The attention y (B, K, G, t, D), and the arrays that backward needs."""

    def visit(state: Any, passing_2BKtD: jax.Array, source: jax.Array) -> Any:
        for queries, keys, is_visible, is_diagonal in blocks(lax.axis_index(AXIS), source):
            block_state = [x[..., queries, :] for x in state]
            block = q_BKGtD[..., queries, :], *passing_2BKtD[..., keys, :], is_diagonal
            block_state = lax.cond(is_visible, merge, skip, block_state, *block)
            state = [x.at[..., queries, :].set(new) for x, new in zip(state, block_state, strict=True)]
        return state

    y_BKGtD = jnp.zeros_like(q_BKGtD, jnp.promote_types(q_BKGtD.dtype, jnp.float32))
    total_BKGt1 = y_BKGtD[..., :1]
    state = [jnp.full_like(total_BKGt1, -jnp.inf), total_BKGt1, y_BKGtD]
    top_BKGt1, total_BKGt1, y_BKGtD = pass_around(visit, state, kv_2BKtD)
    y_BKGtD = (y_BKGtD / total_BKGt1).astype(q_BKGtD.dtype)
    lse_BKGt1 = top_BKGt1 + jnp.log(total_BKGt1)
    y_BKGtD, lse_BKGt1 = (checkpoint_name(x, KEPT_BY_DOTS) for x in (y_BKGtD, lse_BKGt1))
    return y_BKGtD, (q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt1)


def ring_backward(blocks: Blocks, residuals: Any, dy_BKGtD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of q and of K, V."""
    q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt1 = residuals
    dot_BKGt1 = (dy_BKGtD.astype(lse_BKGt1.dtype) * y_BKGtD).sum(-1, keepdims=True)

    def visit(sums: Any, passing_2BKtD: jax.Array, source: jax.Array) -> Any:
        dq_BKGtD, dkv_2BKtD = sums
        for queries, keys, is_visible, is_diagonal in blocks(lax.axis_index(AXIS), source):
            block_sums = dq_BKGtD[..., queries, :], dkv_2BKtD[..., keys, :]
            here = [x[..., queries, :] for x in (q_BKGtD, dy_BKGtD, lse_BKGt1, dot_BKGt1)]
            block = *passing_2BKtD[..., keys, :], *here, is_diagonal
            dq_BKGcD, dkv_2BKcD = lax.cond(is_visible, attend_backward, skip, block_sums, *block)
            dq_BKGtD = dq_BKGtD.at[..., queries, :].set(dq_BKGcD)
            dkv_2BKtD = dkv_2BKtD.at[..., keys, :].set(dkv_2BKcD)
        # Send the sum of dK, dV after their K, V. The sum for the K, V of the next hop arrives.
        with jax.named_scope(f"{KEEPS}ring"):
            return dq_BKGtD, send_to_next(dkv_2BKtD, purpose=ACTIVATION_GRADIENTS)

    zeros = tuple(jnp.zeros_like(x, lse_BKGt1.dtype) for x in (q_BKGtD, kv_2BKtD))
    dq_BKGtD, dkv_2BKtD = pass_around(visit, zeros, kv_2BKtD)
    return dq_BKGtD.astype(q_BKGtD.dtype), dkv_2BKtD.astype(kv_2BKtD.dtype)


ring.defvjp(ring_forward, ring_backward)


def pass_around(visit: Callable[..., Any], state: Any, kv_2BKtD: jax.Array) -> Any:
    """Apply visit(state, K and V, their rank) -> state to the K and V of all ranks, this rank's first."""
    ranks, rank = collectives.axis_size(AXIS), lax.axis_index(AXIS)

    def hop(carry: tuple[Any, jax.Array], number: jax.Array) -> tuple[Any, None]:
        state, kv_2BKtD = carry
        # Send K and V to the next device, and receive the previous device's. `visit` computes meanwhile.
        arriving_2BKtD = send_to_next(kv_2BKtD, purpose=ACTIVATIONS)
        return (visit(state, kv_2BKtD, (rank - number) % ranks), arriving_2BKtD), None

    (state, kv_2BKtD), _ = lax.scan(hop, (state, kv_2BKtD), jnp.arange(ranks - 1))
    return visit(state, kv_2BKtD, (rank + 1) % ranks)


def skip(state: Any, *block: Any) -> Any:
    """Return the state without the block, whose keys are all hidden."""
    return state


def scores(q_BKGcD: jax.Array, k_BKcD: jax.Array, is_diagonal: jax.Array, dtype: Any) -> jax.Array:
    """q k / sqrt(D), and -inf for later keys: (B, K, G, c, c)."""
    scores_BKGcc = jnp.einsum("BKGtD,BKsD->BKGts", q_BKGcD, k_BKcD, preferred_element_type=dtype)
    later_cc = jnp.triu(jnp.ones(scores_BKGcc.shape[-2:], bool), 1) & is_diagonal
    return jnp.where(later_cc, -jnp.inf, scores_BKGcc / math.sqrt(q_BKGcD.shape[-1]))


def attend(
    q_BKGcD: jax.Array, k_BKcD: jax.Array, v_BKcD: jax.Array, is_diagonal: jax.Array, top_BKGc1: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state of a block: largest score, at least `top_BKGc1`; sum of exponentials; weighted values."""
    scores_BKGcc = scores(q_BKGcD, k_BKcD, is_diagonal, top_BKGc1.dtype)
    with jax.named_scope(f"{KEEPS}softmax"):
        top_BKGc1 = jnp.maximum(top_BKGc1, scores_BKGcc.max(-1, keepdims=True))
        weights_BKGcc = jnp.exp(scores_BKGcc - top_BKGc1)
    y_BKGcD = jnp.einsum(
        "BKGts,BKsD->BKGtD",
        weights_BKGcc.astype(v_BKcD.dtype),
        v_BKcD,
        preferred_element_type=top_BKGc1.dtype,
    )
    return top_BKGc1, weights_BKGcc.sum(-1, keepdims=True), y_BKGcD


def merge(state: Any, *block: jax.Array) -> Any:
    """Merge a block into the state: rescale the sums so far to the new largest score, and add."""
    top_BKGc1, total_BKGc1, y_BKGcD = state
    new_top_BKGc1, block_total_BKGc1, block_y_BKGcD = attend(*block, top_BKGc1)
    with jax.named_scope(f"{KEEPS}softmax"):
        scale_BKGc1 = jnp.exp(top_BKGc1 - new_top_BKGc1)
        return [
            new_top_BKGc1,
            scale_BKGc1 * total_BKGc1 + block_total_BKGc1,
            scale_BKGc1 * y_BKGcD + block_y_BKGcD,
        ]


def attend_backward(
    sums: Any,
    k_BKcD: jax.Array,
    v_BKcD: jax.Array,
    q_BKGcD: jax.Array,
    dy_BKGcD: jax.Array,
    lse_BKGc1: jax.Array,
    dot_BKGc1: jax.Array,
    is_diagonal: jax.Array,
) -> Any:
    """Add the gradients of q and of k, v through one block to their sums.

    lse is over all blocks. dot is the sum over D of y dy. Since y is the sum of w v over all keys, dot is the
    sum of w dw, the only number that the derivative of softmax needs of other blocks.
    """
    (dq_BKGcD, dkv_2BKcD), dtype, narrow = sums, lse_BKGc1.dtype, q_BKGcD.dtype
    multiply = partial(jnp.einsum, preferred_element_type=dtype)
    weights_BKGcc = jnp.exp(scores(q_BKGcD, k_BKcD, is_diagonal, dtype) - lse_BKGc1)
    dweights_BKGcc = multiply("BKGtD,BKsD->BKGts", dy_BKGcD, v_BKcD)
    dscores_BKGcc = weights_BKGcc * (dweights_BKGcc - dot_BKGc1) / math.sqrt(q_BKGcD.shape[-1])
    weights_BKGcc, dscores_BKGcc = weights_BKGcc.astype(narrow), dscores_BKGcc.astype(narrow)
    dk_BKcD = multiply("BKGts,BKGtD->BKsD", dscores_BKGcc, q_BKGcD)
    dv_BKcD = multiply("BKGts,BKGtD->BKsD", weights_BKGcc, dy_BKGcD)
    dq_BKGcD += multiply("BKGts,BKsD->BKGtD", dscores_BKGcc, k_BKcD)
    return dq_BKGcD, dkv_2BKcD + jnp.stack([dk_BKcD, dv_BKcD])


# Zigzag ------------------------------------------------------------------------------------------------


def chunks_of(rank: jax.Array, layout: Layout) -> tuple[jax.Array, ...]:
    """Numbers of a rank's chunks along the sequence: one, or with zigzag one from each end."""
    return (rank, 2 * layout.cp - 1 - rank) if layout.zigzag else (rank,)


def zigzag_blocks(rank: jax.Array, source: jax.Array, *, layout: Layout, length: int) -> Iterator[Block]:
    """The blocks of a hop: a chunk of queries and a chunk of keys each. Later chunks of keys are hidden.

    A rank has two chunks of `length` / 2 positions. With its own keys they make three visible blocks, of
    which two are triangles. With the keys of any other rank they make two: all ranks have the same work.
    """
    places = slice(0, length // 2), slice(length // 2, length)
    for query, queries in zip(chunks_of(rank, layout), places, strict=True):
        for key, keys in zip(chunks_of(source, layout), places, strict=True):
            yield queries, keys, key <= query, key == query


def ring_attention(
    core: Any, q_BtHD: jax.Array, k_BtKD: jax.Array, v_BtKD: jax.Array, *, layout: Layout, factor: None
) -> jax.Array:
    """The attention of a ring: q (B, t, H, D), k and v (B, t, K, D), to y (B, t, H, D)."""
    q_BtKGD = q_BtHD.reshape(*k_BtKD.shape[:3], -1, k_BtKD.shape[3])
    kv_2BKtD = jnp.stack([k_BtKD, v_BtKD]).swapaxes(2, 3)
    blocks = plain_blocks
    if layout.zigzag:
        blocks = partial(zigzag_blocks, layout=layout, length=q_BtHD.shape[1])
    y_BKGtD = ring(q_BtKGD.transpose(0, 2, 3, 1, 4), kv_2BKtD, blocks)
    return y_BKGtD.transpose(0, 3, 1, 2, 4).reshape(q_BtHD.shape)
