"""Split of a parameter over the ranks of an axis: its parts, and the whole again."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compare.contract.communication import RECORD
from torchpar.comm.collectives import Axis
from torchpar.guards.parts import mark_part
from torchpar.manual.megatron.mappings import gather_parts


@dataclass(frozen=True)
class Split:
    """The cut of a parameter over an axis.

    Attributes:
        dim: along which.
        size: of the whole along `dim`.
        groups: `dim` holds this many equal parts (q, k and v), and each of them is cut for itself.
        padded: zeros fill up what the ranks do not divide, and `gather` drops them; else ValueError.
    """

    dim: int
    size: int
    groups: int = 1
    padded: bool = False

    def take(self, whole: torch.Tensor, axis: Axis) -> torch.Tensor:
        """A copy of this rank's part, (.., d / R, ..) at `dim`, of the whole, (.., d, ..)."""
        group, rest = divmod(self.size, self.groups)
        if rest or (group % axis.size and not self.padded):
            by = f"{axis.name} = {axis.size}" + (f" x groups = {self.groups}" if self.groups > 1 else "")
            raise ValueError(f"{by} does not divide the {self.size} features of dim {self.dim}")
        share = -(-group // axis.size)
        grouped = whole.detach().unflatten(self.dim, (self.groups, group))
        part = grouped.new_zeros((*whole.shape[: self.dim], self.groups, share, *whole.shape[self.dim + 1 :]))
        start, stop = min(axis.rank * share, group), min((axis.rank + 1) * share, group)
        within = self.dim + 1
        part.narrow(within, 0, stop - start).copy_(grouped.narrow(within, start, stop - start))
        return part.flatten(self.dim, within)

    def gather(self, part: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The whole, (.., d, ..), from every rank's part: the inverse of `take`, on all ranks."""
        parts = (p.unflatten(self.dim, (self.groups, -1)) for p in gather_parts(part, axis, RECORD))
        joined = torch.cat(list(parts), dim=self.dim + 1)
        return joined.narrow(self.dim + 1, 0, self.size // self.groups).flatten(self.dim, self.dim + 1)


class SplitLayer(nn.Module):
    """A layer some of whose parameters are parts.

    Attributes:
        axis: the ranks.
        split: of each part.
        parts: names of the parameters that are parts; the others are whole.
    """

    axis: Axis
    split: Split
    parts: tuple[str, ...] = ("weight",)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, with marked parts."""
        super().__setstate__(state)
        for name in self.parts:
            if (parameter := getattr(self, name)) is not None:
                mark_part(parameter, self.axis)


def require_plain(made: type[nn.Module], of: type[nn.Module], layer: nn.Module) -> None:
    """TypeError if a layer is not what its parts would compute: of another class, or with hooks.

    A subclass may compute something else (weight_norm, LoRA), and so may hooks (old weight_norm, pruning).
    """
    if type(layer) is not of:
        raise TypeError(f"{made.__name__} is made from nn.{of.__name__}, not from {type(layer).__name__}")
    if layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise TypeError(
            f"{made.__name__} would not run the hooks of this {of.__name__} (weight_norm, pruning, or your "
            f"own): remove them, and put them on what is made"
        )


def split_layers_of(module: nn.Module) -> dict[str, SplitLayer]:
    """The layer of each part among a module's parameters, by the parameter's name."""
    return {
        f"{path}.{name}" if path else name: layer
        for path, layer in module.named_modules()
        if isinstance(layer, SplitLayer)
        for name in layer.parts
        if getattr(layer, name) is not None
    }


def take_parameter(whole: torch.Tensor, split: Split, axis: Axis) -> nn.Parameter:
    """This rank's part, (.., d / R, ..), of a parameter, (.., d, ..), as a parameter: frozen if that is."""
    part = nn.Parameter(split.take(whole, axis), requires_grad=whole.requires_grad)
    mark_part(part, axis)
    return part
