"""The training problem as the engines see it: pure functions of the parameters, and what their dims mean.

Legend: A gradient accumulation, L layers, B batch, T position, C n_embd; E experts, of which a token has k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from compare.contract.communication import ROUTING
from compare.spec.experiment import Experiment, Layout
from jaxpar.comm.collectives import ledger_scope
from jaxpar.model import GPT
from jaxpar.placement import joined, place
from jaxpar.remat import Remat
from jaxpar.weights import STACKED, logical_axes

Loss = Callable[[Any, Any], tuple[jax.Array, "Choices"]]
"""loss(params, batch): a scalar, the mean over the batch's rows, and which experts were chosen. The batch has
"inputs" and "targets" (B, T), for dropout "keys" (B, 2)."""
Edit = Callable[[GPT], None]
"""A strategy's: it swaps parts of the model, which knows no layout, before it becomes a loss. Paths stay."""


class Choices(NamedTuple):
    """Of a model with experts, else None: those of each token (L, B, T, k), and how often each was chosen in
    the batch of a pass (L, E), both int32."""

    experts: Any = None
    tokens: Any = None

    def joined(self, dim: int) -> "Choices":
        """With the dim of replicas and that of their rows, which follows it, as one."""
        return self._replace(experts=jax.tree.map(partial(joined, dim=dim), self.experts))


@custom_vmap
def count_replicas(counts: jax.Array) -> jax.Array:
    """Counts as they are; of a model that is `vmap`ped over replicas those of all replicas together."""
    return counts


@count_replicas.def_vmap
def _of_all_replicas(size: int, is_mapped: list[bool], counts: jax.Array) -> tuple[jax.Array, bool]:
    with ledger_scope(ROUTING):
        return count_replicas(counts.sum(axis=0, dtype=counts.dtype)), False


class Pieces(NamedTuple):
    """The model cut where a pipeline cuts it. Each takes the whole tree of parameters, and uses some.

    embed(params, batch): the residual stream (B, T, C) before the first block.
    layers(params, x, batch, first): x after the blocks in `params`; `first` is the first one's number.
    loss(params, x, batch): from the residual stream after the last block.
    """

    embed: Callable[[Any, Any], jax.Array]
    layers: Callable[[Any, jax.Array, Any, ArrayLike], jax.Array]
    loss: Callable[[Any, jax.Array, Any], jax.Array]


@dataclass(frozen=True)
class Problem:
    """One experiment's loss over a tree of parameters."""

    experiment: Experiment

    @property
    def layout(self) -> Layout:
        return self.experiment.layout

    @property
    def remat(self) -> Remat:
        """What forward may keep for backward; auto is dots: faster than none under a scan, and smaller."""
        return "dots" if self.layout.remat == "auto" else self.layout.remat

    @property
    def gathers_in_layers(self) -> bool:
        """Under zero 3: each block gathers its own parameters.

        A pipeline's blocks run at every tick: what is to be kept of them is gathered before the first one.
        """
        return self.layout.zero == 3 and (self.layout.pp == 1 or self.layout.reshard_after_forward)

    @cached_property
    def shapes(self) -> Any:
        """The parameters as `jax.ShapeDtypeStruct`s: nested dicts, blocks stacked."""
        return nnx.to_pure_dict(self._split(())[1])

    def placements(self) -> Any:
        """A `Placement` for each parameter."""
        axes = logical_axes(self.experiment.model)
        return jax.tree.map(lambda leaf, axes: place(leaf.shape, axes, self.layout), self.shapes, axes)

    def loss(self, edits: Sequence[Edit] = ()) -> Loss:
        """The loss of the model after these edits, in order; of experts with their balance."""
        merge = partial(nnx.merge, self._split(edits)[0])

        def loss(params: Any, batch: Any) -> tuple[jax.Array, Choices]:
            model, keys_B2 = merge(params), batch.get("keys")
            x_BTC, routing = model.layers(model.embed(batch["inputs"], keys_B2), keys_B2)
            value = model.head_loss(x_BTC, batch["targets"])
            if routing is None:
                return value, Choices()
            balance, tokens_LE = model.balance(routing)
            return value + balance, Choices(routing.chosen, tokens_LE)

        return loss

    def pieces(self, edits: Sequence[Edit] = ()) -> Pieces:
        """The same in pieces, of a model without experts."""
        model = partial(nnx.merge, self._split(edits)[0])
        return Pieces(
            embed=lambda params, batch: model(params).embed(batch["inputs"], batch.get("keys")),
            layers=lambda params, x, batch, first: model(params).layers(x, batch.get("keys"), first)[0],
            loss=lambda params, x_BTC, batch: model(params).head_loss(x_BTC, batch["targets"]),
        )

    def _split(self, edits: Sequence[Edit]) -> tuple[nnx.GraphDef, nnx.State]:
        """The edited model without numbers: its structure, and its parameters' shapes."""

        def edited() -> GPT:
            model = GPT(self.experiment, remat=self.remat)
            for edit in edits:
                edit(model)
            return model

        return nnx.split(nnx.eval_shape(edited))


def without_layers(tree: dict[str, Any]) -> dict[str, Any]:
    """What of a tree like the parameters is in no block: embeddings and the last norm."""
    return {key: tree[key] for key in tree if key != STACKED}
