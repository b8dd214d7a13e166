"""Context parallelism in types: a device of cp is a replica, with positions of its own, but for attention.

The model is `vmap`ped over replicas, and sees neither rows nor cp (`replicas`): parameters are {R:cp}, their
gradients {U:cp}, which are summed once, with those of the other replicas. Attention alone looks beyond its
replica. It says what becomes of an array under that `vmap`, whose dim, [n@cp], is then in sight:

    allgather   k, v      [n@cp, t] -> [T@cp] -> {R:cp}, a copy for each. Backward: {U:cp} -> [T@cp]
    ulysses     q, k, v   [n@cp, t, n, h] -> [n, t, n@cp, h]: cp splits another dim
                result    the transpose of that, which is also backward

Were it not for that, a product of q [t@cp] and k [S@cp] would have cp twice, which is an error. A ring cannot
be said: a type is a place, and knows no order in time.

Legend: N replicas, of which r are of other axes than cp, of which there are n; B batch, T all positions, t a
replica's; H heads, of which a replica has h under ulysses, D head_dim, G devices of tp.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.contract.communication import ACTIVATIONS
from compare.numerics.context import order_of_positions
from compare.spec.axes import CP, ROWS, TP
from compare.spec.experiment import Experiment
from jaxpar.comm.collectives import ledger_scope
from jaxpar.explicit.replicas import REPLICA, axes_in, copies
from jaxpar.hooks import Hook, Hooks
from jaxpar.placement import merge_dims, split_dim

AXIS = CP


def split_sequence(hooks: Hooks, experiment: Experiment) -> None:
    """Attention moves arrays along cp; the local positions are those of a replica."""
    layout = experiment.layout
    order_T = order_of_positions(experiment.model.block_size, layout)

    def own(table: jax.Array) -> jax.Array:
        return own_rows(table[order_T] if layout.zigzag else table, devices=layout.cp)

    def own_positions(count: int) -> jax.Array:
        return own(jnp.arange(order_T.size))

    def own_heads(count: int) -> jax.Array:
        part_G1 = jnp.arange(layout.tp)[:, None] * layout.cp + lax.axis_index(REPLICA) % layout.cp
        each = count // layout.tp
        return (part_G1 * each + jnp.arange(each)).reshape(-1)

    hooks.local_rows = lambda table, length: own(table)
    hooks.stream_positions = own_positions
    if layout.context == "ulysses":
        hooks.attention, hooks.heads = exchanged_attention, own_heads
    else:
        hooks.attention = partial(gathered_attention, own_positions=own_positions, order_T=order_T)
        hooks.query_positions = own_positions


def own_rows(table_T: jax.Array, *, devices: int) -> jax.Array:
    """This replica's part (t, ..) of (T, ..): a sum of one term, for types refuse an index that differs."""
    table_nt = table_T.reshape(devices, -1, *table_T.shape[1:])
    is_mine_n = jnp.arange(devices) == lax.axis_index(REPLICA) % devices
    return jnp.where(is_mine_n.reshape(-1, *(1,) * table_T.ndim), table_nt, 0).sum(axis=0)


def gathered_attention(
    core: Callable[..., jax.Array],
    q_BtHD: jax.Array,
    *kv: jax.Array,
    own_positions: Callable[[int], jax.Array],
    order_T: np.ndarray,
    factor: Any,
) -> jax.Array:
    """Attention (B, t, H, D) of a replica's queries to the keys of all of cp."""
    positions = own_positions(q_BtHD.shape[1]), order_T
    return core(q_BtHD, *map(of_all_positions, kv), positions=positions, factor=factor)


def exchanged_attention(core: Callable[..., jax.Array], *qkv: jax.Array, factor: Any) -> jax.Array:
    """Attention of all positions in some of the heads; before and after, positions are split."""
    y_BThD = core(*map(some_heads, qkv), factor=factor)
    return all_heads(y_BThD)


def across_replicas(rule: Hook, *, positions: int, heads: int) -> Hook:
    """What is made of a replica's array, by what is made of all replicas': of x (r, n@cp, ...).

    It has n^`positions` times as many positions, and n^`heads` times as many heads.
    """

    @custom_vmap
    def of_replica(x: jax.Array) -> jax.Array:  # for the type alone: it is always mapped
        sharding, (*batch, length, count, dim) = jax.typeof(x).sharding, x.shape
        devices = Fraction(sharding.mesh.shape[AXIS])
        shape = (*batch, int(length * devices**positions), int(count * devices**heads), dim)
        return jnp.zeros(shape, x.dtype, out_sharding=sharding.spec)

    @of_replica.def_vmap
    def of_all(size: int, is_mapped: list[bool], x_N: jax.Array) -> tuple[jax.Array, bool]:
        sharding = jax.typeof(x_N).sharding
        replicas, *others = sharding.spec.partitions
        axes, devices = axes_in(P(replicas)), sharding.mesh.shape[AXIS]
        if AXIS not in axes:  # it is mapped over stages: the replicas' turn comes after that
            return of_replica(x_N), True
        rest = tuple(axis for axis in ROWS if axis in axes) or None
        x_rn = x_N.reshape(-1, devices, *x_N.shape[1:], out_sharding=P(rest, AXIS, *others))
        with ledger_scope(ACTIVATIONS):
            y_rn = rule(x_rn)
        others = jax.typeof(y_rn).sharding.spec.partitions[2:]
        return y_rn.reshape(size, *y_rn.shape[2:], out_sharding=P(replicas, *others)), True

    return of_replica


def gather(x_rn: jax.Array) -> jax.Array:
    """(r, n@cp, .., t, H, D) -> (r, n@cp, .., T, H, D): to each a copy of the whole."""
    x_r = jnp.moveaxis(x_rn, 1, -4)
    x_r = merge_dims(x_r, x_r.ndim - 4)
    *first, _, heads, dim = jax.typeof(x_r).sharding.spec.partitions
    return jnp.moveaxis(copies(reshard(x_r, P(*first, None, heads, dim, reduced={AXIS}))), 0, 1)


def exchange(x_rn: jax.Array) -> jax.Array:
    """(r, n@cp, .., t, H, D) -> (r, n@cp, .., T, h, D): all positions of some heads, from each tp's own."""
    mesh = jax.typeof(x_rn).sharding.mesh
    x_rn = split_dim(x_rn, x_rn.ndim - 2, mesh.shape[TP], mesh.shape[AXIS], -1)  # (.., t, G, n, h, D)
    rest, _, *others, _, heads, dim = jax.typeof(x_rn).sharding.spec.partitions
    x_rn = jnp.moveaxis(reshard(x_rn, P(rest, None, *others, AXIS, heads, dim)), (1, -3), (-5, 1))
    return merge_dims(merge_dims(x_rn, x_rn.ndim - 3), x_rn.ndim - 5)


def exchange_back(y_rn: jax.Array) -> jax.Array:
    """The transpose of `exchange`, which is its inverse."""
    *first, length, heads, dim = y_rn.shape
    devices, y = y_rn.shape[1], jax.typeof(y_rn)
    like = y.update(shape=(*first, length // devices, heads * devices, dim))
    return jax.linear_transpose(exchange, like)(y_rn)[0]


of_all_positions = across_replicas(gather, positions=1, heads=0)
some_heads = across_replicas(exchange, positions=1, heads=-1)
all_heads = across_replicas(exchange_back, positions=-1, heads=1)
