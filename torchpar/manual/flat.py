"""What every wrapper needs: parameters in packs and in flat memory, the same at first on all ranks."""

import itertools
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from compare.contract.communication import REPLICATE
from torchpar.comm.collectives import Axis

MARK = "shared_by"
"""The attribute of a parameter that names the ranks that have it, where these are fewer than all."""
NamedParameters = list[tuple[str, nn.Parameter]]


def pack(named: Iterable[tuple[str, nn.Parameter]], limit_bytes: float) -> list[NamedParameters]:
    """Parameters in their order, in packs that the same ranks have: see `ranks_of`.

    A pack is closed before it would pass `limit_bytes`; 0 gives every parameter its own.
    """
    packs: list[NamedParameters] = []
    unfinished: dict[Axis | None, NamedParameters] = {}
    for name, parameter in named:
        axis = parameter.__dict__.get(MARK)
        members = unfinished.get(axis)
        if members is None or sum(p.nbytes for _, p in members) + parameter.nbytes > limit_bytes:
            members = unfinished[axis] = []
            packs.append(members)
        members.append((name, parameter))
    return packs


def ranks_of(parameter: nn.Parameter, group: Axis) -> Axis:
    """The ranks of a group that have a parameter: all of them, unless it is marked, as experts are."""
    return parameter.__dict__.get(MARK, group)


class Flat:
    """Parameters end to end in flat memory (n,); `starts` of each, and n."""

    def __init__(self, named: NamedParameters):
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self.starts = list(itertools.accumulate((p.numel() for p in self.parameters), initial=0))

    def view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """The view of a flat buffer (n,) that is the parameter at `index`, in its shape."""
        return buffer[self.starts[index] : self.starts[index + 1]].view(self.parameters[index].shape)


@torch.no_grad()
def replicate(tensors: Iterable[torch.Tensor], axes: Sequence[Axis]) -> None:
    """Broadcast tensors of any shapes from the first rank, along one axis after the other."""
    for tensor in tensors:
        for axis in axes:
            if axis.size > 1:
                axis.broadcast(tensor, purpose=REPLICATE)


class Accumulates:
    """A wrapper that reduces gradients in backward, except in `no_sync`: there they only add up."""

    is_synchronizing = True

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Around forward and backward of every pass of a step but the last."""
        self.is_synchronizing = False
        try:
            yield
        finally:
            self.is_synchronizing = True
