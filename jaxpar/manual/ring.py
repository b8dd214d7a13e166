"""Ring attention by hand: K and V pass from device to device, and no device gathers them.

    hop          compute                                        meanwhile
    forward      attention to the K, V that are here            K, V to the next device
    backward     gradients of the K, V that are here            K, V to the next device, then dK, dV

After n - 1 hops every query has seen the keys of all n devices. In backward dK and dV follow their K and V
through all devices, each of which adds its part. After n hops they are back at their own device.

A hop computes one block: all queries of this device against all keys of another. If the keys come first, the
causal mask hides nothing. If both are the same positions, it leaves a triangle. If the keys come later, it
hides the whole block, which is skipped. So the last device has the most work. With zigzag a device has two
chunks of positions, one from each end of the sequence. With its own keys they make three visible blocks, of
which two are triangles. With the keys of any other device they make two: all devices have the same work.

`jaxpar.attention` computes the blocks, by the softmax over blocks and the derivative of its `blockwise` core.
That core also cuts chunks into runs, so no device has a whole block of scores at a time.

Legend: B batch, t this device's positions, n devices, R positions of a run.
K heads of keys and values, G query heads of each, D head_dim.
Sums, and the gradients that pass around, are in float32 at least.
Source: Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.numerics.context import order_of_positions
from compare.spec.axes import CP
from compare.spec.experiment import Layout
from jaxpar.attention import (
    Keys,
    Queries,
    Seen,
    cut_keys,
    cut_queries,
    cut_runs,
    dense_attention,
    finish,
    first_state,
    group_heads,
    join_runs,
    runs_of,
    ungroup_heads,
    visit,
    visit_backward,
)
from jaxpar.comm import collectives
from jaxpar.functional import KEEPS
from jaxpar.remat import KEPT_BY_DOTS

AXIS = CP
send_to_next = partial(collectives.shift, axis=AXIS, by=1)


class Way(NamedTuple):
    """How a ring computes: the layout, and the number of runs into which a device cuts its positions."""

    layout: Layout
    runs: int

    def positions(self, rank: jax.Array, length: int) -> jax.Array:
        """Positions (t,) of a rank, which has `length` of them."""
        return jnp.asarray(order_of_positions(length * self.layout.cp, self.layout).reshape(-1, length))[rank]

    def keys(self, kv_2BKtD: jax.Array, rank: jax.Array) -> Keys:
        """Runs of a rank's keys and values."""
        return cut_keys(*kv_2BKtD, self.positions(rank, kv_2BKtD.shape[-2]), self.runs)

    def queries(self, q_BKGtD: jax.Array) -> Queries:
        """Runs of this device's queries."""
        return cut_queries(q_BKGtD, self.positions(lax.axis_index(AXIS), q_BKGtD.shape[-2]), self.runs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def ring(q_BKGtD: jax.Array, kv_2BKtD: jax.Array, way: Way) -> jax.Array:
    """Attention of this device's queries to the keys of all devices, one device's at a time."""
    return ring_forward(q_BKGtD, kv_2BKtD, way)[0]


def ring_forward(q_BKGtD: jax.Array, kv_2BKtD: jax.Array, way: Way) -> tuple[jax.Array, Any]:
    """The attention y (B, K, G, t, D), and the arrays that backward needs."""
    queries, length = way.queries(q_BKGtD), q_BKGtD.shape[-2]

    def visit_source(state: Any, passing_2BKtD: jax.Array, source: jax.Array) -> Any:
        return visit(state, queries, way.keys(passing_2BKtD, source))

    state = pass_around(visit_source, first_state(queries.q), kv_2BKtD)
    y_BKGtD, lse_BKGt1 = (join_runs(x, length) for x in finish(state, q_BKGtD.dtype))
    y_BKGtD, lse_BKGt1 = (checkpoint_name(x, KEPT_BY_DOTS) for x in (y_BKGtD, lse_BKGt1))
    return y_BKGtD, (q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt1)


def ring_backward(way: Way, residuals: Any, dy_BKGtD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of q and of K, V."""
    q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt1 = residuals
    dot_BKGt1 = (dy_BKGtD.astype(lse_BKGt1.dtype) * y_BKGtD).sum(-1, keepdims=True)
    others = (cut_runs(x, way.runs) for x in (dy_BKGtD, lse_BKGt1, dot_BKGt1))
    queries, length = way.queries(q_BKGtD), q_BKGtD.shape[-2]
    seen = Seen(queries.q, *others, queries.positions)

    def visit_source(sums: Any, passing_2BKtD: jax.Array, source: jax.Array) -> Any:
        dq, dkv_2BKtD = sums
        dkv = tuple(cut_runs(x, way.runs) for x in dkv_2BKtD)
        dq, dkv = visit_backward(dq, dkv, seen, way.keys(passing_2BKtD, source))
        dkv_2BKtD = jnp.stack([join_runs(x, length) for x in dkv])
        # Send the sum of dK, dV after their K, V. The sum for the K, V of the next hop arrives.
        with jax.named_scope(f"{KEEPS}ring"):
            return dq, send_to_next(dkv_2BKtD, purpose=ACTIVATION_GRADIENTS)

    zeros = tuple(jnp.zeros_like(x, lse_BKGt1.dtype) for x in (queries.q, kv_2BKtD))
    dq, dkv_2BKtD = pass_around(visit_source, zeros, kv_2BKtD)
    return join_runs(dq, length).astype(q_BKGtD.dtype), dkv_2BKtD.astype(kv_2BKtD.dtype)


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


def ring_attention(
    core: Any, q_BtHD: jax.Array, k_BtKD: jax.Array, v_BtKD: jax.Array, *, layout: Layout, factor: None
) -> jax.Array:
    """The attention of a ring: q (B, t, H, D), k and v (B, t, K, D), to y (B, t, H, D).

    The core `dense_attention` computes a chunk of queries against a chunk of keys at a time. Any other core
    cuts chunks into runs.
    """
    chunks = 2 if layout.zigzag else 1
    runs = chunks if core is dense_attention else chunks * runs_of(q_BtHD.shape[1] // chunks)
    kv_2BKtD = jnp.stack([k_BtKD, v_BtKD]).swapaxes(2, 3)
    return ungroup_heads(ring(group_heads(q_BtHD, k_BtKD.shape[2]), kv_2BKtD, Way(layout, runs)))
