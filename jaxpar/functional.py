"""The model as pure functions of its parameters, which the engines shard.

Legend: B batch, T position, C n_embd, 2 the words of a key.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike

from compare.spec.experiment import Model, Precision
from jaxpar.model import GPT
from jaxpar.problem import Pieces
from jaxpar.remat import Remat


def make_loss(
    config: Model,
    *,
    precision: Precision,
    remat: Remat,
    loss_chunks: int = 1,
    edit: Callable[[GPT], None] = lambda model: None,
) -> tuple[Callable[..., jax.Array], Any]:
    """The model as a pure function.

    Args:
        config: sizes, bias, activation, epsilon.
        precision: storage and compute dtypes.
        remat: none, dots or full.
        loss_chunks: parts of the positions whose logits exist at once.
        edit: may swap the model's modules and functions before it is split; parameter paths stay.

    Returns:
        `loss(params, batch)`, the mean cross-entropy of `batch = {"inputs": (B, T), "targets": (B, T)}`,
        which drops if there are "keys": (B, 2), too; and the tree of `params` as `jax.ShapeDtypeStruct`s:
        nested dicts, layers stacked.
    """
    graph, state = _abstract(config, precision, edit, remat=remat, loss_chunks=loss_chunks)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return nnx.merge(graph, params).loss(batch["inputs"], batch["targets"], batch.get("keys"))

    return loss, nnx.to_pure_dict(state)


def make_pieces(
    config: Model, *, precision: Precision, remat: Remat, edit: Callable[[GPT], None] = lambda model: None
) -> Pieces:
    """The model as pure functions, cut before and after its blocks. Arguments as of `make_loss`."""
    graph, _ = _abstract(config, precision, edit, remat=remat)

    def loss(params: Any, x_BTC: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return nnx.merge(graph, params).head_loss(x_BTC, batch["targets"])

    def embed(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return nnx.merge(graph, params).embed(batch["inputs"], batch.get("keys"))

    def layers(params: Any, x_BTC: jax.Array, batch: dict[str, jax.Array], first: ArrayLike) -> jax.Array:
        return nnx.merge(graph, params).layers(x_BTC, batch.get("keys"), first)

    return Pieces(embed=embed, layers=layers, loss=loss)


def _abstract(
    config: Model, precision: Precision, edit: Callable[[GPT], None], **options: Any
) -> tuple[nnx.GraphDef, nnx.State]:
    """The edited model without numbers, split into its structure and its parameters' shapes."""

    def edited() -> GPT:
        model = GPT(config, precision=precision, **options)
        edit(model)
        return model

    return nnx.split(nnx.eval_shape(edited))
