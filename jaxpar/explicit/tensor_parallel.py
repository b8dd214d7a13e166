"""Tensor parallelism in types: Megatron's f and g are two casts, and what is split follows from the weight.

    f   x -> {R:tp}         into a column-parallel product. Nothing moves; backward sums {U:tp}
    g   {U:tp} -> x         out of a row-parallel product, whose contraction is over a dim that tp splits

Sequence parallelism changes what x is between the regions, [T@tp]: then f gathers, and g scatters. Types
demand more than the compiler's constraints: a contraction over a split dim is an error until it is said what
becomes of the sum, and so are a lookup in a table of split rows, and a product that is written as one of two
matrices, where heads that are split would be joined with others. And they demand less: of q, k and v, and of
what leaves the column-parallel layer, nothing is said. The types of x and the weight leave one answer.

Legend: B batch, T position, C n_embd, V vocabulary. No type here names an axis of data parallelism: the model
is `vmap`ped over replicas.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.spec.axes import TP
from compare.spec.experiment import Experiment
from jaxpar.derivatives import product
from jaxpar.hooks import Hooks

AXIS = TP
REDUCED, UNREDUCED = P(reduced={AXIS}), P(unreduced={AXIS})


def split_layers(hooks: Hooks, experiment: Experiment) -> None:
    """Cast activations at both ends of a region of split work."""
    between = split_positions if experiment.layout.sequence_parallel else partial(reshard, out_shardings=P())
    for column in (hooks.qkv, hooks.up):  # (B, T, C) -> (B, T, ..@tp)
        column.before, column.matmul = partial(reshard, out_shardings=REDUCED), product
    hooks.before_mix = partial(reshard, out_shardings=P())
    for row in (hooks.out, hooks.down):  # (B, T, ..@tp) -> (B, T, C), the sum said where it is made
        row.matmul, row.after = partial(product, out_sharding=UNREDUCED), between
    hooks.look_up, hooks.after_embedding = rows_of, between
    hooks.before_logits = partial(reshard, out_shardings=REDUCED)
    hooks.vocabulary, hooks.cross_entropy = token_ids, split_cross_entropy


def split_positions(x: jax.Array) -> jax.Array:
    """(.., T, C) -> (.., T@tp, C): of experts devices come before the batch."""
    return reshard(x, P(*[None] * (x.ndim - 2), AXIS))


def rows_of(table_VC: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Rows of a table (V@tp, C) by tokens: (B, T, C)."""
    return table_VC.at[tokens_BT].get(out_sharding=P())


def token_ids(count: int) -> jax.Array:
    """Ids (V@tp) of the logits."""
    return reshard(jnp.arange(count), P(AXIS))


def split_cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """The mean cross-entropy of logits (B, T, V@tp).

    Of each position three numbers are summed over tp, or compared. The target's logit is picked by a mask:
    an index into a dim that is split is an error.
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    id_V = token_ids(logits_BTV.shape[-1])
    greatest_BT1 = lax.stop_gradient(logits_BTV.max(axis=-1, keepdims=True))
    total_BT = jnp.exp(logits_BTV - greatest_BT1).sum(axis=-1)
    of_target_BT = jnp.where(id_V == targets_BT[..., None], logits_BTV, 0).sum(axis=-1)
    return (jnp.log(total_BT) + greatest_BT1[..., 0] - of_target_BT).mean()
