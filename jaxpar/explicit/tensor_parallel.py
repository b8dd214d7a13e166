"""Tensor parallelism in types: Megatron's f and g are two casts.

    f   x -> {R:tp}         before a column-parallel product. Nothing is sent; backward all-reduces {U:tp}
    g   {U:tp} -> x         all-reduce after a row-parallel product, which contracts a dim that tp splits

    {R:tp}   equal on all devices of tp; its gradient is {U:tp}. A cast to it from a whole array sends nothing
    {U:tp}   a partial sum on each device of tp. A cast to whole is an all-reduce, to [T@tp] a reduce-scatter
    [T@tp]   tp splits the dim T. A cast to whole or to {R:tp} is an all-gather

f: every device uses x for its own heads or features, so the gradients of x are added. g: a row-parallel
product multiplies a device's own features, so its outputs are partial sums. Between f and g nothing is sent.

Under sequence parallelism x is [T@tp] between the regions: then f gathers, and g scatters. Gradients of norms
and of row-parallel biases are then partial sums over tp, which XLA adds in the backward loop. XLA on a CPU
all-reduces where it could reduce-scatter.

Types demand more than the constraints of jax-compiler. A contraction of a split dim is an error until its
result has a type. So is a product written as one of two matrices, where split heads would be merged with
other dims. Types also demand less: nothing is written about q, k and v, nor about the output of a
column-parallel layer. The types of x and the weight leave one possibility.

Legend: B batch, T position, C n_embd, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.spec.axes import TP
from compare.spec.experiment import Experiment
from jaxpar.derivatives import matmul
from jaxpar.explicit.sharding_types import axes_of_dims, without
from jaxpar.hooks import Hooks

AXIS = TP


def split_layers(hooks: Hooks, experiment: Experiment) -> None:
    """Cast activations at both ends of a region of split work."""
    g = scatter_positions if experiment.layout.sequence_parallel else whole
    hooks.qkv.before = hooks.up.before = hooks.before_logits = enter_region
    for row in (hooks.out, hooks.down):  # (B, T, ..@tp) -> (B, T, C)
        row.matmul, row.after = row_matmul, g
    # `data_parallel.look_up` requests a whole result: XLA all-reduces the looked-up vectors over tp there. So
    # g sends nothing after it. Under sequence parallelism g keeps this device's positions.
    hooks.after_embedding = g
    # Routing weights (B, T, E) enter the region of the experts: whole, as x. Under sequence parallelism they
    # are all-gathered.
    hooks.before_mix = whole
    hooks.router.matmul = router_matmul
    hooks.vocabulary = token_ids
    hooks.cross_entropy = split_cross_entropy


def enter_region(x_BTC: jax.Array) -> jax.Array:
    """f: x -> {R:tp}."""
    # All-gathers positions that tp splits; else sends nothing. Backward sums, or reduce-scatters.
    return reshard(x_BTC, P(*without(x_BTC, AXIS), reduced={AXIS}))


def row_matmul(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """A row-parallel product, {U:tp}: partial sums, until g."""
    rows = without(x, AXIS)[: x.ndim - contracted]
    return matmul(x, weight, contracted, out_sharding=P(*rows, unreduced={AXIS}))


def whole(x: jax.Array) -> jax.Array:
    """g: the sum of {U:tp}, whole on each device."""
    # All-reduce {U:tp}. All-gather [T@tp]. Nothing is sent for what is whole.
    return reshard(x, P(*without(x, AXIS)))


def scatter_positions(x: jax.Array) -> jax.Array:
    """g under sequence parallelism: the sum (.., T, C) of {U:tp}, [T@tp]."""
    *rows, positions, features = without(x, AXIS)
    # Reduce-scatter; backward all-gathers.
    return reshard(x, P(*rows, (*(positions or ()), AXIS), features))


def router_matmul(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """Logits of the router, whose weight is reduced along all axes that split tokens: tp may be one."""
    tokens = {axis for axes in axes_of_dims(x) for axis in axes}
    return matmul(x, reshard(weight, P(reduced=tokens)), contracted)


def token_ids(count: int) -> jax.Array:
    """Ids (V@tp) of the logits."""
    return reshard(jnp.arange(count), P(AXIS))


def split_cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """The mean cross-entropy of logits (B, T, V@tp).

    For each position three numbers are summed over tp, or compared. A mask picks the logit of the target: an
    index into a split dim is an error.
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    id_V = token_ids(logits_BTV.shape[-1])
    # Three all-reduces of (B, T): a maximum and two sums over V, which tp splits.
    greatest_BT1 = lax.stop_gradient(logits_BTV.max(axis=-1, keepdims=True))
    total_BT = jnp.exp(logits_BTV - greatest_BT1).sum(axis=-1)
    of_target_BT = jnp.where(id_V == targets_BT[..., None], logits_BTV, 0).sum(axis=-1)
    return (jnp.log(total_BT) + greatest_BT1[..., 0] - of_target_BT).mean()
