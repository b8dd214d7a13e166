"""The layout of a flat buffer: where each parameter lies in it, and which cut of it is this rank's."""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from torchpar.comm.chunks import chunk_slices
from torchpar.comm.collectives import Axis


class FlatLayout:
    """The parameters end to end, and the buffer cut over an axis.

    Attributes:
        numel: elements of the buffer.
        own: this rank's cut of it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis):
        # Strides like the parameter's, where it is dense: what kernels and autograd expect of it.
        self._shapes = [(p.shape, torch.empty_like(p, device="meta").stride()) for p in parameters]
        self._starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        self.numel = self._starts[-1]
        self.own = chunk_slices(self.numel, axis.size)[axis.rank]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor (n,), one for each parameter, in its shape."""
        return [self.view(flat, index) for index in range(len(self._shapes))]

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """The view of the parameter at `index` alone."""
        return flat.as_strided(*self._shapes[index], self._starts[index])

    def slice_of(self, index: int) -> slice:
        """The slice of this rank's cut that is the piece of the parameter at `index`."""
        first = max(self._starts[index], self.own.start)
        last = min(self._starts[index + 1], self.own.stop)
        return slice(first - self.own.start, last - self.own.start) if first < last else slice(0, 0)

    def elements_of(self, index: int) -> slice:
        """Elements of the parameter at `index` in this rank's piece, in the order of its strides."""
        first, cut = max(self.own.start - self._starts[index], 0), self.slice_of(index)
        return slice(first, first + cut.stop - cut.start) if cut.start < cut.stop else slice(0, 0)
