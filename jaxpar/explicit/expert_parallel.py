"""Expert parallelism in types: tokens go from [rows@ep] to [experts@ep] and back by two casts.

    up, down    [E@ep]                no copy for each replica: replicas' tokens come to them
    x           [n, rows@ep]          for each of n devices with experts, the tokens that have chosen one
    reshard     -> [n@ep, rows]       the all-to-all; its derivative is the cast back, another one
    y           [n@ep, rows] -> [n, rows@ep], then the sum over n

The model is `vmap`ped over replicas, and ep is one of their axes. So the exchange has a rule of its own for
that `vmap`: there it sees the tokens of all replicas. Shapes are static, as in jax-manual: of a token that
has no expert on a device zeros are sent.

Legend: R replicas, n of which are along ep and D along the other axes, P of these along cp; E experts, B
batch, T position, C n_embd.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.spec.axes import CP, EP
from jaxpar.explicit.replicas import axes_of_replicas, copies
from jaxpar.mlp import Experts
from jaxpar.placement import split_dim

AXIS = EP


def exchange_tokens(experts: Experts, x_BTC: jax.Array, weights_BTE: jax.Array) -> jax.Array:
    """The weighted sum (B, T, C) of all experts' outputs, from where they are."""
    graph, params = nnx.split(experts)

    @custom_vmap
    def exchanged(params: Any, x_BTC: jax.Array, weights_BTE: jax.Array) -> jax.Array:
        return x_BTC  # for the type alone: it is always mapped

    @exchanged.def_vmap
    def of_all(size: int, is_mapped: Any, params: Any, x_RBTC: jax.Array, weights_RBTE: jax.Array):
        sharding = jax.typeof(x_RBTC).sharding
        _, *dims = sharding.spec.partitions
        n, parts = (sharding.mesh.shape[axis] for axis in (AXIS, CP))
        groups = axes_of_replicas(sharding.mesh.shape)
        rest = tuple(axis for axis in groups if axis != AXIS) or None
        rows = tuple(axis for axis in groups if axis not in (AXIS, CP)) or None

        def split(x_R: jax.Array) -> jax.Array:
            """(R, ..) -> (D, n@ep, ..): of the axes of replicas cp comes after ep."""
            shape = x_R.shape[1:]
            x_RnP = x_R.reshape(-1, n, parts, *shape, out_sharding=P(rows, AXIS, CP, *dims))
            return x_RnP.swapaxes(1, 2).reshape(-1, n, *shape, out_sharding=P(rest, AXIS, *dims))

        def whole(y_Dn: jax.Array) -> jax.Array:
            """The inverse."""
            shape = y_Dn.shape[2:]
            y_RPn = y_Dn.reshape(-1, parts, n, *shape, out_sharding=P(rows, CP, AXIS, *dims))
            return y_RPn.swapaxes(1, 2).reshape(size, *shape, out_sharding=sharding.spec)

        def by_device(name: str) -> jax.Array:
            """Weights (E@ep, ..), as (n@ep, D, E / n, ..)."""
            w = copies(params[name]["weight"])
            return split_dim(w if rest else w[None], 1, n, -1).swapaxes(0, 1)

        def mix(own: Any, x_nBTC: jax.Array, weights_nBTE: jax.Array) -> jax.Array:
            return nnx.merge(graph, {**params, **own}).mix(x_nBTC, weights_nBTE)

        here, there = P(None, rest, AXIS, *dims), P(AXIS, rest, None, *dims)
        weights_nDnBTE = jnp.moveaxis(split_dim(split(weights_RBTE), 4, n, -1), 4, 0)
        x_DnBTC = split(x_RBTC.astype(experts.up.compute))
        x_nDnBTC = jnp.where((weights_nDnBTE > 0).any(axis=-1, keepdims=True), x_DnBTC, 0)
        own = {name: {"weight": by_device(name)} for name in ("up", "down")}
        y_nDnBTC = jax.vmap(jax.vmap(mix))(own, reshard(x_nDnBTC, there), reshard(weights_nDnBTE, there))
        return whole(reshard(y_nDnBTC, here).astype(x_RBTC.dtype).sum(axis=0)), True

    return exchanged(nnx.to_pure_dict(params), x_BTC, weights_BTE)
