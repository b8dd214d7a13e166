"""Expert parallelism in types: tokens go from [rows@ep] to [experts@ep] and back by two casts.

    up, down    [E@ep]                 a device of ep has the weights of some experts
    x           [n, rows@ep]           for each of n devices with experts: the tokens that chose one of them
    reshard     -> [n@ep, rows]        the all-to-all; its derivative is the cast back
    y           [n@ep, rows] -> [n, rows@ep], then the sum over n

Shapes are static, as in jax-manual: for a token without an expert on a device, zeros are sent.

Legend: n devices of ep that receive a copy, s devices of ep that have the token, D devices of the other axes.
B batch, b rows of a device, T position, C n_embd, E experts of a device.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.spec.axes import EP
from jaxpar.explicit.sharding_types import axes_of_dims, vmap
from jaxpar.mlp import Experts
from jaxpar.placement import split_dim

AXIS = EP


def exchange_tokens(experts: Experts, x_BTC: jax.Array, weights_BTE: jax.Array) -> jax.Array:
    """The weighted sum (B, T, C) of all experts' outputs, computed where the experts are."""
    mesh = jax.sharding.get_abstract_mesh()
    n = mesh.shape[AXIS]
    (*others, last), positions, _ = axes_of_dims(x_BTC)
    assert last == AXIS, "ep is the innermost axis of the rows"
    by_rows = P(None, others, AXIS, None, positions)
    by_expert = P(AXIS, others, None, None, positions)

    def split_rows(x_BT: jax.Array) -> jax.Array:
        """(B, T, ..) -> (D, s@ep, b, T, ..)."""
        shape = math.prod(mesh.shape[axis] for axis in others), n, -1, *x_BT.shape[1:]
        return x_BT.reshape(shape, out_sharding=P(*by_rows.partitions[1:]))

    weights_nDsbTE = jnp.moveaxis(split_dim(split_rows(weights_BTE), 4, n, -1), 4, 0)
    x_DsbTC = split_rows(x_BTC.astype(experts.up.compute))
    x_nDsbTC = jnp.where((weights_nDsbTE > 0).any(axis=-1, keepdims=True), x_DsbTC, 0)

    params_n, mix = split_experts(experts, n)
    # All-to-all: device s sends copy n of its tokens, and their weights, to device n, which has the experts.
    x_nDsbTC, weights_nDsbTE = (reshard(x, by_expert) for x in (x_nDsbTC, weights_nDsbTE))
    y_nDsbTC = vmap(mix, in_axes=(0, 0, 0))(params_n, x_nDsbTC, weights_nDsbTE)
    # All-to-all: outputs, back to the devices of their rows; then the sum over experts is local.
    y_BTC = reshard(y_nDsbTC, by_rows).astype(x_BTC.dtype).sum(axis=0)
    return y_BTC.reshape(x_BTC.shape, out_sharding=jax.typeof(x_BTC).sharding.spec)


def split_experts(experts: Experts, n: int) -> tuple[Any, Callable[..., jax.Array]]:
    """Weights of the experts of each device, and `Experts.mix` as a function of one device's weights."""
    graph, params = nnx.split(experts)
    params = nnx.to_pure_dict(params)

    def mix(weights: Any, x_DsbTC: jax.Array, weights_DsbTE: jax.Array) -> jax.Array:
        local = {name: {"weight": weight} for name, weight in weights.items()}
        return nnx.merge(graph, {**params, **local}).mix(x_DsbTC, weights_DsbTE)

    return {name: split_dim(params[name]["weight"], 0, n, -1) for name in ("up", "down")}, mix
