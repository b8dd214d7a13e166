"""Attention cores: three programs that compute the same numbers.

    core         weights of attention in memory     derivative      computes
    dense        (B, H, T, S)                       autodiff's      any dtype, dropout
    blockwise    of one block of runs (B, H, R, R)  by hand         any dtype
    fused        none: cuDNN's kernel hides them    cuDNN's         16 bits on a GPU

`blockwise_attention` cuts queries and keys into runs of R positions. It computes one block at a time: a run
of queries against a run of keys. The causal mask hides whole blocks, which `lax.cond` skips. A run of queries
has a state: the largest score so far, the sum of exponentials relative to it, and the sum of values weighted
by them. `merge` adds a block to it, and the order of the blocks does not matter. Autodiff would save the
weights of every block. So backward is written by hand: it computes a block's weights again, from its scores
and the logarithm of the sum over all blocks. Memory grows with T, not with T^2. The ring
(`jaxpar.manual.ring`) visits the keys of one device after the other by the same functions.

Legend: B batch, T and S position, H heads, D head_dim. K heads of keys and values, G query heads of each.
R positions of a run, n runs of queries, m runs of keys. Sums are in float32 at least.
Sources: online softmax (arXiv 1805.02867), FlashAttention (arXiv 2205.14135).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from compare.spec.attention import core_in_jax
from compare.spec.experiment import Experiment
from jaxpar.derivatives import attention_scores
from jaxpar.functional import KEEPS
from jaxpar.placement import merge_dims, split_dim
from jaxpar.remat import KEPT_BY_DOTS

Positions = tuple[ArrayLike, ArrayLike]
"""Positions of queries (T,) and of keys (S,) in the sequence."""
RUN, FEWEST_RUNS = 128, 4
"""Most positions of a run, and fewest runs: with one run no block would be hidden."""
HIDDEN = 2**31 - 1
"""The position of padding: no query sees it."""


def call(compute: Callable[..., jax.Array], *arrays: jax.Array, **options: Any) -> jax.Array:
    """Return compute(*arrays)."""
    return compute(*arrays, **options)


def dense_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    *,
    positions: Positions | None = None,
    factor: Callable[[tuple[int, ...]], jax.Array] | None = None,
) -> jax.Array:
    """Attention softmax(q k / sqrt(D)) v over positions S <= T, (B, T, H, D); the softmax has 32 bits or 64.

    K divides H: each head of k and v serves H / K consecutive heads of q. `jax.nn.dot_product_attention` has
    a float32 softmax for float64 inputs, too.

    Args:
        positions: of q (T,) and of k (S,); by default the first T and S.
        factor: makes the dropout factor of a shape (H, T, S), whose S are in the order of the sequence.
    """
    # Heads before positions, as XLA multiplies: it would copy another order into this one.
    q_BHTD, k_BKSD, v_BKSD = (x.swapaxes(1, 2) for x in (q_BTHD, k_BSKD, v_BSKD))
    k_BHSD, v_BHSD = (repeat_heads(x_BKSD, q_BHTD.shape[1]) for x_BKSD in (k_BKSD, v_BKSD))
    logits_BHTS = attention_scores(q_BHTD, k_BHSD, jnp.promote_types(q_BHTD.dtype, jnp.float32))
    with jax.named_scope(f"{KEEPS}softmax"):
        visible_TS = is_visible(*positions) if positions else jnp.tril(jnp.ones(logits_BHTS.shape[-2:], bool))
        logits_BHTS = jnp.where(visible_TS, logits_BHTS / math.sqrt(q_BHTD.shape[-1]), -jnp.inf)
        weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1)
    if factor is not None:
        factor_BHTS = factor(weights_BHTS.shape[1:])
        weights_BHTS = weights_BHTS * (factor_BHTS[..., positions[1]] if positions else factor_BHTS)
    return jnp.einsum("BHTS,BHSD->BHTD", weights_BHTS.astype(v_BHSD.dtype), v_BHSD).swapaxes(1, 2)


def repeat_heads(x_BKSD: jax.Array, heads: int) -> jax.Array:
    """Keys or values for each head of queries: (B, H, S, D)."""
    batch, kv_heads, *others = x_BKSD.shape
    if kv_heads == heads:
        return x_BKSD
    x_BKGSD = jnp.broadcast_to(x_BKSD[:, :, None], (batch, kv_heads, heads // kv_heads, *others))
    return merge_dims(x_BKGSD, 1)


def is_visible(q_positions_T: ArrayLike, k_positions_S: ArrayLike) -> jax.Array:
    """Causal mask, bool (T, S)."""
    return jnp.asarray(q_positions_T)[:, None] >= jnp.asarray(k_positions_S)


def blockwise_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    *,
    positions: Positions | None = None,
    factor: None = None,
    per_device: Callable[..., jax.Array] = call,
) -> jax.Array:
    """As `dense_attention`, by blocks. Differentiable in reverse mode only; without dropout.

    Args:
        per_device: (a function of q, k, v and both positions, these arrays) -> its result. An engine whose
            arrays are global calls it with the arrays of each device: loops run over a device's positions.
    """
    if positions is None:
        positions = jnp.arange(q_BTHD.shape[1]), jnp.arange(k_BSKD.shape[1])
    return per_device(attend_by_blocks, q_BTHD, k_BSKD, v_BSKD, *map(jnp.asarray, positions))


@jax.custom_vjp
def attend_by_blocks(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    q_positions_T: jax.Array,
    k_positions_S: jax.Array,
) -> jax.Array:
    """Attention (B, T, H, D)."""
    return _forward(q_BTHD, k_BSKD, v_BSKD, q_positions_T, k_positions_S)[0]


def _forward(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, *positions: jax.Array) -> Any:
    length, runs = q_BTHD.shape[1], runs_of(q_BTHD.shape[1])
    k_BKSD, v_BKSD = (x.swapaxes(1, 2) for x in (k_BSKD, v_BSKD))
    queries = cut_queries(group_heads(q_BTHD, k_BSKD.shape[2]), positions[0], runs)
    keys = cut_keys(k_BKSD, v_BKSD, positions[1], runs_of(k_BSKD.shape[1]))
    y_nBKGRD, lse = finish(visit(first_state(queries.q), queries, keys), q_BTHD.dtype)
    y_BTHD = ungroup_heads(join_runs(y_nBKGRD, length))
    y_BTHD, lse = (checkpoint_name(x, KEPT_BY_DOTS) for x in (y_BTHD, lse))
    return y_BTHD, (q_BTHD, k_BSKD, v_BSKD, *positions, y_BTHD, lse)


def _backward(residuals: Any, dy_BTHD: jax.Array) -> Any:
    q_BTHD, k_BSKD, v_BSKD, *positions, y_BTHD, lse = residuals
    length, runs, kv_heads = q_BTHD.shape[1], runs_of(q_BTHD.shape[1]), k_BSKD.shape[2]
    dot_BTH1 = (dy_BTHD.astype(lse.dtype) * y_BTHD).sum(-1, keepdims=True)
    dy, dot = (cut_runs(group_heads(x, kv_heads), runs) for x in (dy_BTHD, dot_BTH1))
    queries = cut_queries(group_heads(q_BTHD, kv_heads), positions[0], runs)
    k_BKSD, v_BKSD = (x.swapaxes(1, 2) for x in (k_BSKD, v_BSKD))
    keys = cut_keys(k_BKSD, v_BKSD, positions[1], runs_of(k_BSKD.shape[1]))
    seen = Seen(queries.q, dy, lse, dot, queries.positions)
    dq, dk, dv = (jnp.zeros_like(x, lse.dtype) for x in (queries.q, keys.k, keys.v))
    dq, dkv = visit_backward(dq, (dk, dv), seen, keys)
    dk_BSKD, dv_BSKD = (join_runs(x, k_BSKD.shape[1]).swapaxes(1, 2).astype(k_BSKD.dtype) for x in dkv)
    return ungroup_heads(join_runs(dq, length)).astype(q_BTHD.dtype), dk_BSKD, dv_BSKD, None, None


attend_by_blocks.defvjp(_forward, _backward)


# Blocks ------------------------------------------------------------------------------------------------


def runs_of(positions: int) -> int:
    """Number of runs of a number of positions."""
    return max(FEWEST_RUNS, -(-positions // RUN))


def group_heads(x_BTHD: jax.Array, kv_heads: int) -> jax.Array:
    """(B, T, H, D) to (B, K, G, T, D)."""
    return jnp.moveaxis(split_dim(x_BTHD, 2, kv_heads, -1), 1, 3)


def ungroup_heads(x_BKGTD: jax.Array) -> jax.Array:
    """The inverse of `group_heads`."""
    return merge_dims(jnp.moveaxis(x_BKGTD, 3, 1), 2)


def cut(x: ArrayLike, runs: int, *, dim: int, **padding: Any) -> jax.Array:
    """x (.., T, ..) as runs, (.., n, R, ..). `padding` of the last run are arguments of `jnp.pad`."""
    x = jnp.asarray(x)
    missing = -x.shape[dim] % runs
    if missing:
        x = jnp.pad(x, [(0, missing * (d == dim)) for d in range(x.ndim)], **padding)
    return split_dim(x, dim, runs, -1)


def cut_runs(x_BKTD: jax.Array, runs: int) -> jax.Array:
    """Runs of positions: (B, .., T, D) to (n, B, .., R, D)."""
    return jnp.moveaxis(cut(x_BKTD, runs, dim=x_BKTD.ndim - 2), -3, 0)


def join_runs(x_nBKRD: jax.Array, length: int) -> jax.Array:
    """The inverse of `cut_runs`, without padding."""
    return merge_dims(jnp.moveaxis(x_nBKRD, 0, -3), x_nBKRD.ndim - 3)[..., :length, :]


def bound(*arrays: jax.Array) -> Any:
    """Return the arrays, each dependent on all.

    Positions are constants. If they did not depend on the stream, autodiff would compute the masks of all
    blocks before the scan over layers, (n, m, R, R).
    """
    return lax.optimization_barrier(arrays)


class Queries(NamedTuple):
    """Runs of queries: the queries (n, B, K, G, R, D), and their positions (n, R)."""

    q: jax.Array
    positions: jax.Array


class Keys(NamedTuple):
    """Runs of keys and values (m, B, K, R, D), and their positions (m, R)."""

    k: jax.Array
    v: jax.Array
    positions: jax.Array


def cut_queries(q_BKGTD: jax.Array, positions_T: ArrayLike, runs: int) -> Queries:
    """Runs of queries. Padding has the last position, so it sees a key."""
    q_BKGTD, positions_T = bound(q_BKGTD, jnp.asarray(positions_T))
    return Queries(cut_runs(q_BKGTD, runs), cut(positions_T, runs, dim=0, mode="edge"))


def cut_keys(k_BKSD: jax.Array, v_BKSD: jax.Array, positions_S: ArrayLike, runs: int) -> Keys:
    """Runs of keys and values. No query sees padding."""
    k_BKSD, positions_S = bound(k_BKSD, jnp.asarray(positions_S))
    positions = cut(positions_S, runs, dim=0, constant_values=HIDDEN)
    return Keys(cut_runs(k_BKSD, runs), cut_runs(v_BKSD, runs), positions)


def first_state(q_nBKGRD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state of runs of queries before any key: largest score, sum of exponentials, weighted values."""
    y = jnp.zeros_like(q_nBKGRD, jnp.promote_types(q_nBKGRD.dtype, jnp.float32))
    total = y[..., :1]
    return jnp.full_like(total, jnp.finfo(y.dtype).min), total, y


def visit(state: Any, queries: Queries, keys: Keys) -> Any:
    """The state of each run of queries after all keys. Hidden blocks are skipped."""

    def visit_run(run: tuple[Any, Queries]) -> Any:
        def add(state: Any, block: Keys) -> tuple[Any, None]:
            is_seen = run[1].positions.max() >= block.positions.min()
            return lax.cond(is_seen, merge, skip, state, run[1], block), None

        return lax.scan(add, run[0], keys)[0]

    return lax.map(visit_run, (state, queries))


def finish(state: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The attention (n, B, K, G, R, D), and the logarithm of the sums of exponentials (n, B, K, G, R, 1)."""
    top, total, y = state
    return (y / total).astype(dtype), top + jnp.log(total)


class Seen(NamedTuple):
    """Runs of queries in backward, (n, B, K, G, R, ..)."""

    q: jax.Array
    dy: jax.Array
    lse: jax.Array
    """Logarithm of the sum of exponentials over all keys."""
    dot: jax.Array
    """Sum over D of y dy. Since y is the sum of w v over all keys, it is the sum of w dw: the only number
    that the derivative of softmax needs of other blocks."""
    positions: jax.Array


def visit_backward(
    dq: jax.Array, dkv: tuple[jax.Array, ...], queries: Seen, keys: Keys
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Add the gradients of all blocks to sums: dq (n, B, K, G, R, D), dk and dv (m, B, K, R, D)."""

    def visit_keys(dq: jax.Array, run: tuple[Any, Keys]) -> tuple[jax.Array, Any]:
        def add(sums: Any, block: tuple[jax.Array, Seen]) -> tuple[Any, None]:
            (dq, dkv), (number, seen) = sums, block
            is_seen = seen.positions.max() >= run[1].positions.min()
            own = lax.dynamic_index_in_dim(dq, number, keepdims=False)
            own, dkv = lax.cond(is_seen, attend_backward, skip, (own, dkv), seen, run[1])
            return (lax.dynamic_update_index_in_dim(dq, own, number, 0), dkv), None

        (dq, dkv), _ = lax.scan(add, (dq, run[0]), (jnp.arange(len(dq)), queries))
        return dq, dkv

    return lax.scan(visit_keys, dq, (dkv, keys))


def skip(state: Any, *block: Any) -> Any:
    """Return the state without the block, whose keys are all hidden."""
    return state


def scores(queries: Any, keys: Keys, dtype: Any) -> jax.Array:
    """q k / sqrt(D) of a block, and -inf for later keys: (B, K, G, R, R)."""
    scores_BKGRR = jnp.einsum("BKGtD,BKsD->BKGts", queries.q, keys.k, preferred_element_type=dtype)
    visible_RR = is_visible(queries.positions, keys.positions)
    return jnp.where(visible_RR, scores_BKGRR / math.sqrt(keys.k.shape[-1]), -jnp.inf)


def merge(state: Any, queries: Queries, keys: Keys) -> Any:
    """Merge a block into the state of its queries: rescale to the new largest score, and add."""
    top, total, y = state
    scores_BKGRR = scores(queries, keys, y.dtype)
    with jax.named_scope(f"{KEEPS}softmax"):
        new_top = jnp.maximum(top, scores_BKGRR.max(-1, keepdims=True))
        weights_BKGRR, scale = jnp.exp(scores_BKGRR - new_top), jnp.exp(top - new_top)
    added = jnp.einsum(
        "BKGts,BKsD->BKGtD", weights_BKGRR.astype(keys.v.dtype), keys.v, preferred_element_type=y.dtype
    )
    with jax.named_scope(f"{KEEPS}softmax"):
        return new_top, scale * total + weights_BKGRR.sum(-1, keepdims=True), scale * y + added


def attend_backward(sums: Any, queries: Seen, keys: Keys) -> Any:
    """Add the gradients of q and of k, v through one block to their sums."""
    (dq_BKGRD, (dk_BKRD, dv_BKRD)), dtype, narrow = sums, queries.lse.dtype, queries.q.dtype
    multiply = partial(jnp.einsum, preferred_element_type=dtype)
    weights_BKGRR = jnp.exp(scores(queries, keys, dtype) - queries.lse)
    dweights_BKGRR = multiply("BKGtD,BKsD->BKGts", queries.dy, keys.v)
    dscores_BKGRR = weights_BKGRR * (dweights_BKGRR - queries.dot) / math.sqrt(keys.k.shape[-1])
    weights_BKGRR, dscores_BKGRR = weights_BKGRR.astype(narrow), dscores_BKGRR.astype(narrow)
    dk_BKRD += multiply("BKGts,BKGtD->BKsD", dscores_BKGRR, queries.q)
    dv_BKRD += multiply("BKGts,BKGtD->BKsD", weights_BKGRR, queries.dy)
    dq_BKGRD += multiply("BKGts,BKsD->BKGtD", dscores_BKGRR, keys.k)
    return dq_BKGRD, (dk_BKRD, dv_BKRD)


# Cores -------------------------------------------------------------------------------------------------


def fused_attention(
    *qkv: jax.Array,
    positions: None = None,
    factor: None = None,
    per_device: Callable[..., jax.Array] = call,
) -> jax.Array:
    """As `dense_attention` of the first T positions, by cuDNN's kernel: q, k, v in 16 bits, on a GPU."""
    return per_device(partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"), *qkv)


def attention_core(
    experiment: Experiment, per_device: Callable[..., jax.Array] = call, *, by_types: bool = False
) -> Callable[..., jax.Array]:
    """The core of an experiment on this process's devices; `by_types` for jax-explicit.

    `per_device` is as in `blockwise_attention`.
    """
    match core_in_jax(experiment, platform=jax.default_backend(), by_types=by_types):
        case "dense":
            return dense_attention
        case "blockwise":
            return partial(blockwise_attention, per_device=per_device)
        case "fused":
            return partial(fused_attention, per_device=per_device)
