"""Data parallelism in types: parameters are "reduced", their gradients "unreduced", and one cast is the sum.

    parameter   {R:dp}   equal on every device
    batch       [B@dp]   rows are split
    gradient    {U:dp}   a partial sum on each device; the type records that the sum is pending
    reshard     {U:dp} -> whole: the all-reduce of gradients, once a step

A compiler has no option "do not reduce yet": it reduces where a gradient is made, at each iteration of each
loop. A type has it. Partial sums are added to partial sums over the layers, over both uses of a tied
embedding and over all passes of an accumulation. Then they are summed once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.contract.communication import ROUTING
from jaxpar.comm.collectives import ledger_scope
from jaxpar.derivatives import matmul
from jaxpar.explicit.sharding_types import axes_of_dims, broadcast, reduced_specs, unreduced_specs
from jaxpar.hooks import Hooks, identity
from jaxpar.model import Loss
from jaxpar.placement import specs
from jaxpar.step import accumulate_gradients


def mean_gradients(
    loss: Loss,
    params: Any,
    batch: Any,
    placements: Any,
    *,
    zero: int = 0,
    scatter: Callable[[Any], Any] = identity,
    scale: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Mean loss with routing, and mean gradients, over a batch (A, B, ...) whose rows are split.

    `scatter` sums gradients over dp_shard into shards, for a stage of ZeRO.
    """
    # Cast to {R:dp}: from here on gradients of the parameters are {U:dp}. Nothing is sent.
    params = reshard(params, reduced_specs(placements, sharded=zero == 3))

    def zeros(w: jax.Array, spec: P) -> jax.Array:
        return reshard(jnp.zeros(w.shape, w.dtype, out_sharding=P(*spec.partitions)), spec)

    def synchronize(gradients: Any) -> Any:
        gradients = scatter(gradients) if zero else gradients
        return sum_replicas(gradients, placements, sharded=zero > 0)

    return accumulate_gradients(
        loss,
        params,
        batch,
        scale=scale,
        # ZeRO 2 and 3 reduce-scatter after each pass; others add partial sums, and send nothing.
        reduce=scatter if zero >= 2 else identity,
        finish=synchronize,
        like=jax.tree.map(zeros, params, unreduced_specs(placements, sharded=zero >= 2)),
    )


def sum_replicas(gradients: Any, placements: Any, *, sharded: bool) -> Any:
    """Sum partial gradients over all replicas, `sharded` under ZeRO."""
    # Cast from {U:dp}: the all-reduce, of all gradients, once a step. Nothing is left to compute meanwhile.
    return reshard(gradients, specs(placements, sharded=sharded))


def type_rows(hooks: Hooks) -> None:
    """Give the model what types demand of rows that are split."""
    hooks.broadcast, hooks.look_up, hooks.sum_tokens = broadcast, look_up, sum_tokens
    hooks.sum_counts = hooks.mean_probability = all_reduce
    for linear in (hooks.qkv, hooks.out, hooks.up, hooks.down, hooks.router):
        # Products dim by dim: a reshape of a reduced array has no type.
        linear.matmul, linear.broadcast = matmul, broadcast


def look_up(table_VC: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Rows (B, T, C) of a table by tokens, split as the tokens are."""
    return table_VC.at[tokens_BT].get(out_sharding=P(*axes_of_dims(tokens_BT)))


def sum_tokens(x_BTE: jax.Array) -> jax.Array:
    """Sums (E,) over tokens; of floating point {U} along the axes that split them."""
    rows, positions, _ = axes_of_dims(x_BTE)
    with ledger_scope(ROUTING):
        if jnp.issubdtype(x_BTE.dtype, jnp.integer):
            # All-reduce (E,) in each layer: a scan sums counts that are unreduced, without a purpose.
            return x_BTE.sum(axis=(0, 1), dtype=x_BTE.dtype)
        return lax.reduce_sum(x_BTE, (0, 1), out_sharding=P(unreduced={*rows, *positions}))


def all_reduce(x_LE: jax.Array) -> jax.Array:
    """Sums over all tokens, of the partial sums of all layers."""
    # All-reduce, once a pass.
    with ledger_scope(ROUTING):
        return reshard(x_LE, P())
