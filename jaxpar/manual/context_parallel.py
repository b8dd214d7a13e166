"""Context parallelism by hand: each device has some of the positions, and its queries see the keys of all.

    context     forward                                    backward
    allgather   all_gather of k and v                      its transpose, reduce_scatter of their gradients
    ring        k and v one device on, n - 1 times         once more; with them their gradients, n times: home
    ulysses     all_to_all of q, k, v: heads for           its transpose is itself, the other way round
                positions; of the result: back

All else in a GPT works on one position at a time. Parameters are the same on all devices, and gradients are
means over cp as over replicas.

Autodiff would keep k and v of each hop, in the end all of them. So backward is by hand: `attend_backward`
makes the weights of a block again, from its scores and the logarithm of the sum over ALL keys. Of two runs of
neighbouring positions, of queries and of keys, the mask leaves all, a triangle or nothing; nothing is not
computed. In zigzag, where each device has two runs, that is as much on every device at every hop.

Legend: B batch, T this device's positions, R those of one of its runs, K heads of keys and values, G queries'
heads of each, D head_dim, n devices, P runs of each. Sums are in float32 at least, and so are gradients that
travel. Sources: Ring Attention (arXiv 2310.01889), Llama 3 (2407.21783, 3.3.2), Ulysses (2309.14509).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.numerics.context import order_of_positions
from compare.spec.axes import CP
from compare.spec.experiment import Experiment, Layout
from jaxpar.comm import collectives
from jaxpar.functional import is_visible
from jaxpar.hooks import Hooks
from jaxpar.manual.strategy import Strategy
from jaxpar.measure.hlo import AGAIN
from jaxpar.remat import KEPT_BY_DOTS

AXIS = CP
POSITION_DIM, HEADS_DIM = 1, 2
"""Of (B, T, K, D)."""
keep = lambda state, *block: state  # noqa: E731
_send = partial(collectives.shift, axis=AXIS, by=-1)


def strategy(experiment: Experiment, placements: Any, hooks: Hooks) -> Strategy:
    """The attention of the layout's way, and this device's positions."""
    layout = experiment.layout
    if layout.cp == 1:
        return Strategy()
    order_S = order_of_positions(experiment.model.block_size, layout)
    own, of_stream = partial(own_positions, order_S), hooks.stream_positions
    hooks.local_rows = lambda table, length: table[own(length)]
    hooks.stream_positions = lambda count: own(count)[of_stream(count)]  # tp may split those of this device
    if layout.context == "ring":
        hooks.attention = partial(ring_attention, layout=layout)
    elif layout.context == "ulysses":
        hooks.attention = exchanged_attention
        hooks.heads = partial(collectives.own_places, axis=AXIS, of=hooks.heads)
    else:
        hooks.attention, hooks.query_positions = partial(gathered_attention, order_S=order_S), own
    return Strategy()


def own_positions(order_S: np.ndarray, length: int) -> jax.Array:
    """Those of this device's T places, of all in the order of the devices."""
    return collectives.own_shard(jnp.asarray(order_S), AXIS, dim=0)


def gathered_attention(
    core: Callable[..., jax.Array], q_BTHD: jax.Array, *kv: jax.Array, order_S: np.ndarray, factor: Any
) -> jax.Array:
    """Attention (B, T, H, D) of this device's queries to the keys of all."""
    gather = partial(collectives.all_gather, axis=AXIS, dim=POSITION_DIM, purpose=ACTIVATIONS)
    positions = own_positions(order_S, q_BTHD.shape[1]), order_S
    return core(q_BTHD, *map(gather, kv), positions=positions, factor=factor)


def exchanged_attention(core: Callable[..., jax.Array], *qkv: jax.Array, factor: Any) -> jax.Array:
    """Attention (B, T, H, D) of all positions in some of the heads; before and after, positions are split."""
    exchange = partial(collectives.all_to_all, axis=AXIS, purpose=ACTIVATIONS)
    y_BSHD = core(*(exchange(x, split=HEADS_DIM, joined=POSITION_DIM) for x in qkv), factor=factor)
    return exchange(y_BSHD, split=POSITION_DIM, joined=HEADS_DIM)


def ring_attention(
    core: Any, q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, *, layout: Layout, factor: None
) -> jax.Array:
    """Attention (B, T, H, D) to keys that pass by, those of one device at a time."""
    q_BTKGD = q_BTHD.reshape(*k_BTKD.shape[:3], -1, k_BTKD.shape[3])
    kv_2BKTD = jnp.stack([k_BTKD, v_BTKD]).swapaxes(2, 3)
    y_BKGTD = _ring(q_BTKGD.transpose(0, 2, 3, 1, 4), kv_2BKTD, layout)
    return y_BKGTD.transpose(0, 3, 1, 2, 4).reshape(q_BTHD.shape)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ring(q_BKGTD: jax.Array, kv_2BKTD: jax.Array, layout: Layout) -> jax.Array:
    return _ring_forward(q_BKGTD, kv_2BKTD, layout)[0]


def _ring_forward(q_BKGTD: jax.Array, kv_2BKTD: jax.Array, layout: Layout) -> tuple[jax.Array, Any]:
    """The result, and what backward needs. A run's state: maximum, sum of exponentials, weighted values."""
    queries, wide = runs(q_BKGTD, layout), jnp.promote_types(q_BKGTD.dtype, jnp.float32)

    def visit(states: Any, kv_2BKTD: jax.Array, source: jax.Array) -> Any:
        for i, j, is_seen, places in blocks(q_BKGTD, source, layout):
            block = queries[i], runs(kv_2BKTD, layout)[j], places
            states[i] = lax.cond(is_seen, attend, keep, states[i], *block)
        return states

    def start(q_BKGRD: jax.Array) -> Any:
        zeros_BKGRD = jnp.zeros_like(q_BKGRD, wide)
        return jnp.full_like(zeros_BKGRD[..., 0], -jnp.inf), zeros_BKGRD[..., 0], zeros_BKGRD

    states = pass_round(visit, [start(q_BKGRD) for q_BKGRD in queries], kv_2BKTD)
    y_BKGTD = jnp.concatenate([y / total[..., None] for _, total, y in states], axis=-2).astype(q_BKGTD.dtype)
    lse_BKGT = jnp.concatenate([top + jnp.log(total) for top, total, _ in states], axis=-1)
    y_BKGTD, lse_BKGT = (checkpoint_name(x, KEPT_BY_DOTS) for x in (y_BKGTD, lse_BKGT))
    return y_BKGTD, (q_BKGTD, kv_2BKTD, y_BKGTD, lse_BKGT)


def _ring_backward(layout: Layout, residuals: Any, g_BKGTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of q, k and v. Those of k and v gather what each device has of them, and come home."""
    q_BKGTD, kv_2BKTD, y_BKGTD, lse_BKGT = residuals
    dot_BKGT = (g_BKGTD.astype(lse_BKGT.dtype) * y_BKGTD).sum(-1)
    of_queries = list(zip(*(runs(x, layout) for x in (q_BKGTD, g_BKGTD)), strict=True))
    sums = list(zip(*(runs(x[..., None], layout) for x in (lse_BKGT, dot_BKGT)), strict=True))

    def visit(state: Any, kv_2BKTD: jax.Array, source: jax.Array) -> Any:
        of_q, home_2BKTD = state
        of_kv = runs(home_2BKTD, layout)
        for i, j, is_seen, places in blocks(q_BKGTD, source, layout):
            block = *of_queries[i], *sums[i], runs(kv_2BKTD, layout)[j], places
            so_far = of_q[i], of_kv[j]
            of_q[i], of_kv[j] = lax.cond(is_seen, attend_backward, keep, so_far, *block)
        return of_q, _send(jnp.concatenate(of_kv, axis=-2), purpose=ACTIVATION_GRADIENTS)

    zeros = partial(jnp.zeros_like, dtype=lse_BKGT.dtype)
    start = [zeros(q) for q, _ in of_queries], zeros(kv_2BKTD)
    of_q, of_kv_2BKTD = pass_round(visit, start, kv_2BKTD)
    return jnp.concatenate(of_q, axis=-2).astype(q_BKGTD.dtype), of_kv_2BKTD.astype(kv_2BKTD.dtype)


_ring.defvjp(_ring_forward, _ring_backward)


def pass_round(visit: Callable[..., Any], state: Any, kv_2BKTD: jax.Array) -> Any:
    """`visit(state, k and v, the device they are of)`, this one's first: the next arrive meanwhile."""
    devices, rank = collectives.axis_size(AXIS), lax.axis_index(AXIS)

    def hop(carry: tuple[Any, jax.Array], number: jax.Array) -> tuple[Any, None]:
        state, kv_2BKTD = carry
        with jax.named_scope(AGAIN):  # in backward, too, they are no gradients
            arriving_2BKTD = _send(kv_2BKTD, purpose=ACTIVATIONS)
        return (visit(state, kv_2BKTD, (rank - number) % devices), arriving_2BKTD), None

    (state, kv_2BKTD), _ = lax.scan(hop, (state, kv_2BKTD), jnp.arange(devices - 1))
    return visit(state, kv_2BKTD, (rank + 1) % devices)


def runs(x: jax.Array, layout: Layout) -> list[jax.Array]:
    """The parts (.., R, D) of x (.., T, D): neighbouring positions."""
    return jnp.split(x, 2 if layout.zigzag else 1, axis=-2)


def blocks(q_BKGTD: jax.Array, source: jax.Array, layout: Layout) -> Any:
    """Pairs of runs, of this device and of a source: does the mask leave anything? And their positions."""
    order_S = order_of_positions(q_BKGTD.shape[-2] * layout.cp, layout)
    places_nPR = jnp.asarray(order_S.reshape(layout.cp, 2 if layout.zigzag else 1, -1))
    for i, of_q_R in enumerate(places_nPR[lax.axis_index(AXIS)]):
        for j, of_k_R in enumerate(places_nPR[source]):
            yield i, j, of_q_R[0] >= of_k_R[0], (of_q_R, of_k_R)


def scores(q_BKGRD: jax.Array, k_BKRD: jax.Array, places: Any, dtype: Any) -> jax.Array:
    """q k / sqrt(D), -inf where it is hidden."""
    scores_BKGRR = jnp.einsum("BKGRD,BKSD->BKGRS", q_BKGRD, k_BKRD, preferred_element_type=dtype)
    return jnp.where(is_visible(*places), scores_BKGRR / math.sqrt(q_BKGRD.shape[-1]), -jnp.inf)


def attend(state: Any, q_BKGRD: jax.Array, kv_2BKRD: jax.Array, places: Any) -> Any:
    """The state of a run of queries after one block more."""
    (top_BKGR, total_BKGR, y_BKGRD), (k_BKRD, v_BKRD) = state, kv_2BKRD
    scores_BKGRR = scores(q_BKGRD, k_BKRD, places, top_BKGR.dtype)
    new_BKGR = jnp.maximum(top_BKGR, scores_BKGRR.max(-1))
    weights_BKGRR, shrinks_BKGR = jnp.exp(scores_BKGRR - new_BKGR[..., None]), jnp.exp(top_BKGR - new_BKGR)
    of_block_BKGRD = jnp.einsum(
        "BKGRS,BKSD->BKGRD", weights_BKGRR.astype(v_BKRD.dtype), v_BKRD, preferred_element_type=top_BKGR.dtype
    )
    total_BKGR = shrinks_BKGR * total_BKGR + weights_BKGRR.sum(-1)
    return new_BKGR, total_BKGR, shrinks_BKGR[..., None] * y_BKGRD + of_block_BKGRD


def attend_backward(
    so_far: Any,
    q_BKGRD: jax.Array,
    g_BKGRD: jax.Array,
    lse_BKGR1: jax.Array,
    dot_BKGR1: jax.Array,
    kv_2BKRD: jax.Array,
    places: Any,
) -> Any:
    """Gradients of a run of queries, and of keys with values, with those through one block."""
    (of_q_BKGRD, of_kv_2BKRD), (k_BKRD, v_BKRD) = so_far, kv_2BKRD
    dtype, narrow = lse_BKGR1.dtype, q_BKGRD.dtype
    multiply = partial(jnp.einsum, preferred_element_type=dtype)
    weights_BKGRR = jnp.exp(scores(q_BKGRD, k_BKRD, places, dtype) - lse_BKGR1)
    of_weights_BKGRR = multiply("BKGRD,BKSD->BKGRS", g_BKGRD, v_BKRD)
    of_scores_BKGRR = weights_BKGRR * (of_weights_BKGRR - dot_BKGR1) / math.sqrt(q_BKGRD.shape[-1])
    weights_BKGRR, of_scores_BKGRR = weights_BKGRR.astype(narrow), of_scores_BKGRR.astype(narrow)
    of_k_BKRD = multiply("BKGRS,BKGRD->BKSD", of_scores_BKGRR, q_BKGRD)
    of_v_BKRD = multiply("BKGRS,BKGRD->BKSD", weights_BKGRR, g_BKGRD)
    of_q_BKGRD += multiply("BKGRS,BKSD->BKGRD", of_scores_BKGRR, k_BKRD)
    return of_q_BKGRD, of_kv_2BKRD + jnp.stack([of_k_BKRD, of_v_BKRD])
