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
    """Parameters in their order, in packs of one dtype, device and `ranks_of`, all trainable or all frozen.

    A pack is closed before it would pass `limit_bytes`; 0 gives every parameter its own.
    """
    packs: list[NamedParameters] = []
    unfinished: dict[tuple, NamedParameters] = {}
    for name, parameter in named:
        alike = (parameter.dtype, parameter.device, parameter.requires_grad, parameter.__dict__.get(MARK))
        members = unfinished.get(alike)
        if members is None or sum(p.nbytes for _, p in members) + parameter.nbytes > limit_bytes:
            members = unfinished[alike] = []
            packs.append(members)
        members.append((name, parameter))
    return packs


def ranks_of(parameter: nn.Parameter, group: Axis) -> Axis:
    """The ranks of a group that have a parameter: all of them, unless it is marked, as experts are."""
    return parameter.__dict__.get(MARK, group)


class Flat:
    """Parameters of one dtype and device, end to end in flat memory (n,); `starts` of each, and n."""

    def __init__(self, named: NamedParameters):
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self.starts = list(itertools.accumulate((p.numel() for p in self.parameters), initial=0))
        # Strides like the parameter's, where it is dense: what kernels and autograd expect of it.
        self._shapes = [(p.shape, torch.empty_like(p, device="meta").stride()) for p in self.parameters]

    def view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """The view of a flat buffer (n,) that is the parameter at `index`, in its shape."""
        return buffer.as_strided(*self._shapes[index], self.starts[index])


@torch.no_grad()
def replicate(tensors: Iterable[torch.Tensor], axes: Sequence[Axis | None]) -> None:
    """Broadcast tensors of any shapes from the first rank, along one axis after the other."""
    axes = [axis for axis in axes if axis and axis.size > 1]
    for tensor in tensors:
        sent = tensor.contiguous()  # the tensor, or a copy of a strided one
        for axis in axes:
            axis.broadcast(sent, purpose=REPLICATE)
        if sent is not tensor:
            tensor.copy_(sent)


class Accumulates:
    """A wrapper that reduces gradients in backward, except in `no_sync`: there they only add up."""

    is_synchronizing = True

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Around forward and backward of every pass of a step but the last."""
        before, self.is_synchronizing = self.is_synchronizing, False
        try:
            yield
        finally:
            self.is_synchronizing = before
