"""Tensor parallelism by hand: Megatron's split of heads, MLP and vocabulary.

A region of split work begins with f and ends with g, which are each other's transposes:

                         f: copy_to_region                   g: reduce_from_region
    tp                   mark varying (all_reduce)           all_reduce (mark varying)

                         all_gather_to_region                reduce_scatter_from_region
    sequence parallel    all_gather T (reduce_scatter T)     reduce_scatter T (all_gather T)

Backward is in brackets. A layer has two regions, attention and MLP. The embedding needs g alone; the head
needs f alone, as its logits stay split, and the loss is computed on them as they are. q, k and v are one
product, so that f costs one reduction in backward, and not three.

Outside the regions everything is equal on all devices of tp, gradients too, but under sequence parallelism,
where each device normalises its own positions: gradients of LayerNorms, row biases and positions are partial,
and are summed once a step. Sources: Shoeybi, arXiv 1909.08053; Korthikanti, arXiv 2205.05198.

Legend: B batch, T position (T/t between the regions under sequence parallelism), C n_embd, V this device's
part of the vocabulary, t the degree of tp.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from compare.contract.communication import ACTIVATIONS, LOSS, REPLICATED_GRADIENTS
from compare.spec.axes import TP
from compare.spec.experiment import Experiment
from jaxpar.comm import collectives
from jaxpar.hooks import Hook, Hooks
from jaxpar.manual.strategy import Strategy
from jaxpar.placement import map_repeated

AXIS = TP
POSITION_DIM = 1


def strategy(experiment: Experiment, placements: Any, hooks: Hooks) -> Strategy:
    """The model's linear maps, embedding and loss work on this device's part."""
    sequence_parallel = experiment.layout.sequence_parallel
    if experiment.layout.tp == 1:
        return Strategy()

    f = all_gather_to_region if sequence_parallel else copy_to_region
    g = reduce_scatter_from_region if sequence_parallel else reduce_from_region
    hooks.qkv.before = hooks.up.before = f  # column-parallel: outputs are split, and so is the bias
    hooks.before_mix = f  # each device has a part of the sums whose terms they are
    hooks.out.after = hooks.down.after = g  # row-parallel: inputs are split; the bias is added once
    hooks.look_up, hooks.before_logits = partial(rows_of, g=g), f
    if sequence_parallel:
        hooks.slice_positions = partial(collectives.own_shard, axis=AXIS, dim=0)
    hooks.vocabulary, hooks.cross_entropy = token_ids, cross_entropy
    split_rows(hooks, sequence_parallel=sequence_parallel)
    if not sequence_parallel:
        return Strategy()
    mark_varying = partial(collectives.to_varying, axis=AXIS)
    total = partial(collectives.all_reduce, axis=AXIS, purpose=REPLICATED_GRADIENTS)
    return Strategy(
        mark=partial(map_repeated, mark_varying, AXIS, placements),
        reduce=partial(map_repeated, total, AXIS, placements),
    )


def split_rows(hooks: Hooks, *, sequence_parallel: bool) -> None:
    """Give dropout the heads of this device, and its positions."""
    hooks.heads = partial(collectives.own_places, axis=AXIS, of=hooks.heads)
    if sequence_parallel:
        hooks.stream_positions = partial(collectives.own_places, axis=AXIS, of=hooks.stream_positions)


def copy_to_region(x_BTC: jax.Array) -> jax.Array:
    """Megatron's f: the identity; its transpose is an all-reduce."""
    return collectives.to_varying(x_BTC, AXIS, purpose=ACTIVATIONS)


def reduce_from_region(partial_BTC: jax.Array) -> jax.Array:
    """Megatron's g: an all-reduce; its transpose is the identity."""
    return collectives.all_reduce(partial_BTC, AXIS, purpose=ACTIVATIONS)


def all_gather_to_region(x_BTC: jax.Array) -> jax.Array:
    """f under sequence parallelism: an all-gather of positions; its transpose is a reduce-scatter."""
    return collectives.all_gather(x_BTC, AXIS, dim=POSITION_DIM, purpose=ACTIVATIONS)


def reduce_scatter_from_region(partial_BTC: jax.Array) -> jax.Array:
    """g under sequence parallelism: a reduce-scatter of positions; its transpose is an all-gather."""
    return collectives.reduce_scatter(partial_BTC, AXIS, dim=POSITION_DIM, purpose=ACTIVATIONS)


def rows_of(table_VC: jax.Array, tokens_BT: jax.Array, *, g: Hook) -> jax.Array:
    """Each device looks up the tokens whose rows it has: (B, T, C)."""
    row_BT, mine_BT = own_rows(tokens_BT, len(table_VC))
    return g(jnp.where(mine_BT[..., None], table_VC[row_BT], 0))


def own_rows(tokens_BT: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Rows of tokens in this device's `rows` of the vocabulary, and whether they are there at all."""
    row_BT = tokens_BT - lax.axis_index(AXIS) * rows
    return jnp.clip(row_BT, 0, rows - 1), (row_BT >= 0) & (row_BT < rows)


def token_ids(count: int) -> jax.Array:
    """Ids (V,) of this device's logits."""
    return lax.axis_index(AXIS) * count + jnp.arange(count)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of split logits: three all-reduces of (B, T).

    Targets are ids in the full vocabulary.
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    top_BT = collectives.all_reduce_max(lax.stop_gradient(logits_BTV).max(-1), AXIS, purpose=LOSS)
    own_BT = jnp.exp(logits_BTV - top_BT[..., None]).sum(-1)
    total_BT = collectives.all_reduce(own_BT, AXIS, purpose=LOSS)
    row_BT, mine_BT = own_rows(targets_BT, logits_BTV.shape[-1])
    picked_BT = jnp.take_along_axis(logits_BTV, row_BT[..., None], axis=-1)[..., 0]
    target_BT = collectives.all_reduce(jnp.where(mine_BT, picked_BT, 0), AXIS, purpose=LOSS)
    return (jnp.log(total_BT) + top_BT - target_BT).mean()
