"""The training step that an engine makes of a `Problem`, and where its arrays live.

Legend: A gradient accumulation, B batch, T position.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxpar.comm.hosts import fetch
from jaxpar.problem import Loss


@dataclass(frozen=True, kw_only=True)
class ShardedStep:
    """One training step over a mesh, and where its arguments live."""

    step: Callable[..., Any]
    """step(params, opt_state, batch, scalars) -> (params, opt_state, {"loss", "grad_norm"}, gradients).

    `batch` is a dict of (A, B, T); `gradients` are synchronised and unclipped: the loop compiles the
    step without them, and only a ladder asks for them.
    """
    placements: Any
    """A tree of `Placement`s like the parameters: how true arrays are padded into stored ones."""
    params: Any
    """A tree of shardings like the parameters."""
    moments: Any
    """Shardings of each moment, and of the gradients that the step returns."""
    accumulated: Any
    """Shardings of gradients as they accumulate over a batch, before the optimizer."""
    batch: Sharding
    """Sharding of each (A, B, T) array of the batch."""
    scalars: Sharding
    moments_at_rest: Any = None
    """Like `moments`: where they are between two steps, if that is elsewhere."""
    compiler_options: dict[str, Any] = field(default_factory=dict)

    def pad(self, tree: Any) -> Any:
        """True arrays (NumPy) as they are stored."""
        return jax.tree.map(lambda p, x: p.pad(x), self.placements, tree)

    def unpad(self, tree: Any) -> Any:
        """Stored arrays, fetched to the host, without their padding."""
        return jax.tree.map(lambda p, x: p.unpad(x), self.placements, fetch(tree))


def passes_of(batch: Any) -> int:
    """A: how many passes are accumulated over a batch of (A, B, ...)."""
    (passes,) = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    return passes


def shardings(mesh: Mesh, placements: Any, *, sharded: bool) -> Any:
    """A tree of NamedShardings; leaves are split over dp_shard only if `sharded`."""
    return jax.tree.map(lambda p: NamedSharding(mesh, p.spec(sharded=sharded)), placements)


def accumulated_gradients(
    loss: Loss,
    params: Any,
    batch: Any,
    *,
    reduce: Callable[[Any], Any] = lambda gradients: gradients,
    finish: Callable[[Any], Any] = lambda gradients: gradients,
    like: Any = None,
) -> tuple[jax.Array, Any]:
    """Mean loss and its gradients over the A microbatches of a batch, one at a time.

    Args:
        loss: see `Loss`.
        params: any pytree.
        batch: a pytree of arrays (A, B, ...).
        reduce: applied to the gradients of each microbatch before they are added up.
        finish: applied to their sum, before it is divided.
        like: a pytree like what `reduce` returns; `params` by default.

    Returns:
        The loss, and gradients as `finish` leaves them: sums over A divided by A.
    """
    value_and_grad = jax.value_and_grad(loss)
    accumulation = passes_of(batch)
    if accumulation == 1:
        value, gradients = value_and_grad(params, jax.tree.map(lambda x: x[0], batch))
        return value, finish(reduce(gradients))

    def add(total: Any, microbatch: Any) -> tuple[Any, jax.Array]:
        value, gradients = value_and_grad(params, microbatch)
        return jax.tree.map(lax.add, total, reduce(gradients)), value

    zeros = jax.tree.map(jnp.zeros_like, params if like is None else like)
    total, losses_A = lax.scan(add, zeros, batch)
    return losses_A.mean(), jax.tree.map(lambda g: g / accumulation, finish(total))
