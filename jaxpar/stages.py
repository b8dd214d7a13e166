"""Stages that are a dim of the arrays: whose turn is what, and where microbatches wait.

What the pipelines of jax-compiler and jax-explicit share: nothing here moves data.

Legend: A gradient accumulation, B batch, M microbatches, S stages at work at once, N chunks of each, K = M/S
lanes, rounded up.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxpar.remat import IsGather, Remat, apply_remat

Tree = Any


class Turn(NamedTuple):
    """One device's task at a tick: numbers of its chunk's turn, of its stage, and of the microbatch."""

    chunk: jax.Array
    stage: jax.Array
    microbatch: jax.Array


Stage = Callable[[Tree, jax.Array, Turn], jax.Array]
"""(layers_N, x, turn) -> x, of one device's layers (N, L, ...)."""


def one_pass(batch: Tree, *, microbatches: int) -> Tree:
    """(A, B, ...) -> (1, M, b, ...): the microbatches of all accumulated passes, which share one schedule.

    Microbatch i of a pass has the sequences i, i + M/A, ...: of a B that is split over devices each device
    keeps its own.
    """

    def cut(x_AB: jax.Array) -> jax.Array:
        passes, size, *rest = x_AB.shape
        if size % microbatches:
            raise ValueError(f"layout.microbatches = {microbatches} does not divide {size} rows of a pass")
        x_AbM = x_AB.reshape(passes, size // microbatches, microbatches, *rest)
        return x_AbM.swapaxes(1, 2).reshape(passes * microbatches, size // microbatches, *rest)[None]

    return jax.tree.map(cut, batch)


def lanes(microbatches: int, stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places where microbatches wait, and where they are when they are done.

    Returns:
        Three arrays (S, K): the microbatch that enters from each place; the one that has been put into it
        in the end; and whether there is one. Places that have none name any.
    """
    count = -(-microbatches // stages)
    places_SK = np.arange(count * stages).reshape(count, stages).T
    enters_SK = places_SK % microbatches

    lane, place = np.divmod(np.arange(microbatches), stages)
    # The last lane, if it is short, has not rolled all the way round when its last microbatch is done.
    place = np.where(lane == count - 1, place - microbatches % -stages, place)
    leaves_SK, counts_SK = np.zeros_like(enters_SK), np.zeros_like(enters_SK, bool)
    leaves_SK[place, (lane + 1) % count] = np.arange(microbatches)
    counts_SK[place, (lane + 1) % count] = True
    return enters_SK, leaves_SK, counts_SK


def make_stage(
    chunk: Callable[[Tree, jax.Array, Turn], jax.Array],
    *,
    chunks: int,
    remat: Remat,
    is_gather: IsGather | None,
) -> Stage:
    """The function of a device at a tick: it picks the chunk whose turn it is, and applies it.

    Args:
        chunk: (layers, x, turn) -> x, with layers (layers of a chunk, ...) and x (B, ...) of a microbatch.
        chunks, remat, is_gather: see `pipelined`.
    """
    if chunks == 1 and is_gather is None:
        return lambda layers_N, x, turn: chunk(jax.tree.map(lambda w_N: w_N[0], layers_N), x, turn)

    # A lone chunk that gathers its layers is picked, too: JAX takes out of the loop what is the same at every
    # tick, and forward would gather all layers of a stage before it begins.
    def stage(layers_N: Tree, x: jax.Array, turn: Turn) -> jax.Array:
        pick = partial(lax.dynamic_index_in_dim, index=turn.chunk, keepdims=False)
        return chunk(jax.tree.map(pick, layers_N), x, turn)

    def is_copy(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        """Makes a tick's own copy of parameters, which is not to be kept: there would be one for each.

        `vmap` makes a gather of picking by an index. (A layer's own gathers are computed anew, no more.)
        """
        return primitive.name == "gather" or (
            is_gather is not None and is_gather(primitive, *arguments, **parameters)
        )

    return apply_remat(stage, remat, is_gather=is_copy)
