"""Where the shards of each parameter are: for the gradient norm, the record and checkpoints."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from torchpar.comm.collectives import Axis

Parameters = Mapping[str, nn.Parameter]
"""Parameters by nanoGPT's names."""
TensorsByName = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Shards of parameters by nanoGPT's names. A parameter without axes is whole on every rank.

    Attributes:
        axes: the mesh axes along which the ranks have different shards of a parameter.
        elements: the slice of this rank's tensor-parallel shard, flattened, that ZeRO assigns to this rank.
            A name that is missing: all elements.
        counted_elsewhere: parameters that another rank has too, and counts in the gradient norm.
        owned: the parameters that this rank's optimizer updates, and the axis whose ranks divide whole
            parameters among them, as PyTorch's ZeRO-1 does. None: each rank updates its shards.
        finish_gradients: completes the gradients of these parameters after the last backward of a step.
        gather: full tensors from the shards of all ranks, which call it together.
    """

    axes: Mapping[str, tuple[Axis, ...]] = field(default_factory=dict)
    elements: Mapping[str, slice] = field(default_factory=dict)
    counted_elsewhere: frozenset[str] = frozenset()
    owned: tuple[Collection[str], Axis] | None = None
    finish_gradients: Callable[[Parameters], None] = lambda parameters: None
    gather: Callable[[TensorsByName], TensorsByName] = lambda shards: shards

    def within(self, outer: "Sharding") -> "Sharding":
        """This sharding inside of `outer`. The inner sharding finishes and gathers first."""

        def finish_gradients(parameters: Parameters) -> None:
            self.finish_gradients(parameters)
            outer.finish_gradients(parameters)

        names = {**self.axes, **outer.axes}
        return Sharding(
            axes={name: (*self.axes.get(name, ()), *outer.axes.get(name, ())) for name in names},
            elements={**self.elements, **outer.elements},
            counted_elsewhere=self.counted_elsewhere | outer.counted_elsewhere,
            owned=self.owned or outer.owned,
            finish_gradients=finish_gradients,
            gather=lambda shards: outer.gather(self.gather(shards)),
        )

    def updates(self, name: str) -> bool:
        """True if this rank's optimizer updates its shard of the parameter, and keeps the moments."""
        return self.owned is None or name in self.owned[0]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local shard, (.., d / R, ..); any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor


def divide_gradient(loss: torch.Tensor, ranks: int) -> torch.Tensor:
    """The loss, (). Each of `ranks` ranks then begins backward with its share of the gradient."""
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient / ranks)
    return loss
