"""What an engine is given, a `Problem`, and what it makes of it: a `Plan`, which the training loop runs.

Legend: A gradient accumulation, B batch, T position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding

from compare.contract.experiment import Layout
from jaxpar import placement
from jaxpar.placement import Placement
from jaxpar.remat import Remat

Loss = Callable[[Any, Any], jax.Array]
"""loss(params, batch): a scalar, the mean over the batch's leading dim."""
Edit = Callable[[Any], None]
"""Swaps parts of a model before it becomes a loss; parameter paths stay."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A model cut where a pipeline may cut it. Each takes the whole tree of parameters, and uses some."""

    embed: Callable[[Any, Any], jax.Array]
    """embed(params, batch): the first stage's beginning, x (B, ...)."""
    layers: Callable[[Any, jax.Array], jax.Array]
    """layers(params, x): x after the stacked layers that `params` has, however many."""
    loss: Callable[[Any, jax.Array, Any], jax.Array]
    """loss(params, x, batch): the last stage's end, the mean over the batch's leading dim."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be trained: a loss over a pytree, and what its leaves' dims mean."""

    build: Callable[[Edit], Loss]
    """The loss of the model after an edit. Data parallelism and ZeRO 1 and 2 edit nothing: under these any
    loss will do, `lambda edit: loss`."""
    shapes: Any
    """The parameters: a nested dict of arrays or `jax.ShapeDtypeStruct`s."""
    axes: Any
    """Like `shapes`, with a tuple of logical axis names, one for each dim, for a leaf."""
    remat: Remat
    pieces: Callable[[Edit], Pieces] | None = None
    """The same model in pieces; pipelines need it."""
    vocab_size: int = 0
    """Of a language model, without padding; tensor parallelism needs it."""
    stacked: str = "blocks"
    """The key of `shapes` whose leaves stack the layers that the model scans over."""

    def edited(self, edits: Sequence[Edit]) -> Loss:
        """The loss of the model after several edits, in order."""
        return self.build(in_order(edits))

    def edited_pieces(self, edits: Sequence[Edit]) -> Pieces:
        """The pieces of the model after several edits, in order. Raises ValueError if it has none."""
        if self.pieces is None:
            raise ValueError("layout.pp needs a model in pieces: give Problem.pieces")
        return self.pieces(in_order(edits))

    def place(self, layout: Layout, *, split: dict[str, str]) -> Any:
        """Where every leaf lives: a tree of `Placement`s. See `placement.place`."""

        def place(leaf: Any, axes: tuple[str, ...]) -> Placement:
            return placement.place(
                leaf.shape,
                axes,
                split=split,
                tp=layout.tp,
                shards=layout.dp_shard,
                pp=layout.pp,
                chunks=layout.chunks,
            )

        return jax.tree.map(place, self.shapes, self.axes)


def in_order(edits: Sequence[Edit]) -> Edit:
    """Several edits as one."""

    def edit(model: Any) -> None:
        for each in edits:
            each(model)

    return edit


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An engine's step, and where its arguments live."""

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
    """The same, for each moment, and for the gradients that the step returns."""
    accumulated: Any
    """The same, for gradients as they pile up over a batch: what a device holds before the optimizer."""
    batch: Sharding
    """Of each (A, B, T) array of the batch."""
    scalars: Sharding
    compiler_options: dict[str, Any] = field(default_factory=dict)

    def pad(self, tree: Any) -> Any:
        """True arrays (NumPy) as they are stored."""
        return jax.tree.map(lambda p, x: p.pad(x), self.placements, tree)

    def strip(self, tree: Any) -> Any:
        """Stored arrays, fetched to the host, without their padding."""
        return jax.tree.map(lambda p, x: p.strip(x), self.placements, jax.device_get(tree))


def shardings(mesh: Mesh, placements: Any, *, sharded: bool) -> Any:
    """A tree of NamedShardings; leaves are split over dp_shard only if `sharded`."""
    return jax.tree.map(lambda p: NamedSharding(mesh, p.spec(sharded=sharded)), placements)


def accumulated_gradients(
    loss: Loss,
    params: Any,
    batch: Any,
    *,
    reduce: Callable[[Any], Any] = lambda gradients: gradients,
    like: Any = None,
) -> tuple[jax.Array, Any]:
    """Mean loss and its gradients over the A microbatches of a batch, one at a time.

    Args:
        loss: see `Loss`.
        params: any pytree.
        batch: a pytree of arrays (A, B, ...).
        reduce: applied to the gradients of each microbatch before they are added up.
        like: a pytree like what `reduce` returns; `params` by default.

    Returns:
        The loss, and gradients as `reduce` leaves them: sums over A divided by A.
    """
    value_and_grad = jax.value_and_grad(loss)
    (accumulation,) = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if accumulation == 1:
        value, gradients = value_and_grad(params, jax.tree.map(lambda x: x[0], batch))
        return value, reduce(gradients)

    def add(total: Any, microbatch: Any) -> tuple[Any, jax.Array]:
        value, gradients = value_and_grad(params, microbatch)
        return jax.tree.map(lax.add, total, reduce(gradients)), value

    zeros = jax.tree.map(jnp.zeros_like, params if like is None else like)
    total, losses_A = lax.scan(add, zeros, batch)
    return losses_A.mean(), jax.tree.map(lambda g: g / accumulation, total)
