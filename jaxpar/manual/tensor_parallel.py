"""Tensor parallelism by hand: Megatron's split of heads, MLP and vocabulary.

    module                 on each device                      communication
    qkv, up                some heads, some inner features     f before
    out, down              the inputs that match them          g after
    experts                some inner features of each         f before, g after
    embedding              some rows of the vocabulary         g after
    head and loss          logits of these rows                f before, three all-reduces in the loss
    norms, other biases    all parameters                      none; with sequence parallelism once a step

                                   forward                      backward
    copy_to_region             f   identity (marks varying)     all-reduce
    reduce_from_region         g   all-reduce                   identity (marks varying)
    all_gather_to_region       f   all-gather of T              reduce-scatter of T     sequence parallel
    reduce_scatter_from_region g   reduce-scatter of T          all-gather of T         sequence parallel

Each function is one collective, and autodiff writes its transpose. A layer has two regions, attention and
MLP. q, k and v are one product, so f costs one all-reduce in backward and not three.

Outside the regions arrays and gradients are equal on all devices of tp. Under sequence parallelism each
device has some positions there. Gradients of norms, row biases and position vectors are then partial sums,
and are all-reduced once a step.

Legend: B batch, T position (T/t between regions under sequence parallelism), C n_embd, V local part of the
vocabulary, t degree of tp.
Sources: Megatron-LM (arXiv 1909.08053), sequence parallelism (arXiv 2205.05198).
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
    """Set f and g around the split regions, and the split embedding and loss."""
    sequence_parallel = experiment.layout.sequence_parallel
    if experiment.layout.tp == 1:
        return Strategy()

    f = all_gather_to_region if sequence_parallel else copy_to_region
    g = reduce_scatter_from_region if sequence_parallel else reduce_from_region
    # Column-parallel: outputs and bias are split. f sends in backward (sequence parallel: also in forward).
    hooks.qkv.before = hooks.up.before = f
    hooks.before_mix = f  # routing weights enter the region of the experts
    # Row-parallel: inputs are split. g adds the partial sums in forward; then the bias is added once.
    hooks.out.after = hooks.down.after = g
    # The table is split over its rows: g adds the looked-up vectors, and f precedes the split logits.
    hooks.look_up, hooks.before_logits = partial(rows_of, g=g), f
    if sequence_parallel:
        hooks.position_vectors = lambda table, x: collectives.local_shard(table, AXIS, dim=0)
    hooks.vocabulary, hooks.cross_entropy = token_ids, cross_entropy
    split_rows(hooks, sequence_parallel=sequence_parallel)
    if not sequence_parallel:
        return Strategy()
    # Marked varying, these gradients stay local in backward. One all-reduce each adds them once a step.
    mark_varying = partial(collectives.to_varying, axis=AXIS)
    total = partial(collectives.all_reduce, axis=AXIS, purpose=REPLICATED_GRADIENTS)
    return Strategy(
        mark=partial(map_repeated, mark_varying, AXIS, placements),
        reduce=partial(map_repeated, total, AXIS, placements),
    )


def split_rows(hooks: Hooks, *, sequence_parallel: bool) -> None:
    """Set the global indices of local heads and positions; dropout draws its bits by them."""
    hooks.heads = partial(collectives.local_indices, axis=AXIS, of=hooks.heads)
    if sequence_parallel:
        hooks.stream_positions = partial(collectives.local_indices, axis=AXIS, of=hooks.stream_positions)


def copy_to_region(x_BTC: jax.Array) -> jax.Array:
    """Megatron's f: the identity; its transpose is an all-reduce."""
    # Every device uses x for its own heads or features: backward sums the gradients of x over the devices.
    return collectives.to_varying(x_BTC, AXIS, purpose=ACTIVATIONS)


def reduce_from_region(partial_BTC: jax.Array) -> jax.Array:
    """Megatron's g: an all-reduce; its transpose is the identity."""
    # Every device has the product of its own features, a partial sum: add the sums of all devices.
    return collectives.all_reduce(partial_BTC, AXIS, purpose=ACTIVATIONS)


def all_gather_to_region(x_BTC: jax.Array) -> jax.Array:
    """f under sequence parallelism: an all-gather of positions; its transpose is a reduce-scatter."""
    # The region computes on whole sequences: gather the positions of all devices.
    return collectives.all_gather(x_BTC, AXIS, dim=POSITION_DIM, purpose=ACTIVATIONS)


def reduce_scatter_from_region(partial_BTC: jax.Array) -> jax.Array:
    """g under sequence parallelism: a reduce-scatter of positions; its transpose is an all-gather."""
    # Add the partial sums, and keep this device's positions.
    return collectives.reduce_scatter(partial_BTC, AXIS, dim=POSITION_DIM, purpose=ACTIVATIONS)


def rows_of(table_VC: jax.Array, tokens_BT: jax.Array, *, g: Hook) -> jax.Array:
    """Vectors (B, T, C) of tokens; each device looks up the tokens of its rows."""
    row_BT, is_local_BT = to_local_rows(tokens_BT, len(table_VC))
    # Other devices contribute zeros. g adds the vectors of all devices.
    return g(jnp.where(is_local_BT[..., None], table_VC[row_BT], 0))


def to_local_rows(tokens_BT: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Local row of each token, clipped to the `rows` of this device, and whether the token is local."""
    row_BT = tokens_BT - lax.axis_index(AXIS) * rows
    return jnp.clip(row_BT, 0, rows - 1), (row_BT >= 0) & (row_BT < rows)


def token_ids(count: int) -> jax.Array:
    """Ids (V,) of this device's logits."""
    return lax.axis_index(AXIS) * count + jnp.arange(count)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of split logits (B, T, V), by three all-reduces of (B, T).

    Targets are ids in the full vocabulary.
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    # All-reduce the maximum. The softmax does not depend on it, so it has no gradient.
    top_BT = collectives.all_reduce_max(lax.stop_gradient(logits_BTV).max(-1), AXIS, purpose=LOSS)
    local_BT = jnp.exp(logits_BTV - top_BT[..., None]).sum(-1)
    # All-reduce the denominator.
    total_BT = collectives.all_reduce(local_BT, AXIS, purpose=LOSS)
    row_BT, is_local_BT = to_local_rows(targets_BT, logits_BTV.shape[-1])
    picked_BT = jnp.take_along_axis(logits_BTV, row_BT[..., None], axis=-1)[..., 0]
    # All-reduce the logit of the target. One device has it, and the others contribute zero.
    target_BT = collectives.all_reduce(jnp.where(is_local_BT, picked_BT, 0), AXIS, purpose=LOSS)
    return (jnp.log(total_BT) + top_BT - target_BT).mean()
