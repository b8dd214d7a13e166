"""Where parameters lie in a flat buffer of all of them, and which cut of it is this rank's."""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from torchpar.comm.chunks import pieces
from torchpar.comm.collectives import Axis


class Places:
    """The parameters end to end, and the buffer cut over an axis.

    Attributes:
        count: elements of the buffer.
        own: this rank's cut of it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis):
        # Strides like the parameter's, where it is dense: what kernels and autograd expect of it.
        self._shapes = [(p.shape, torch.empty_like(p, device="meta").stride()) for p in parameters]
        self._starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        self.count = self._starts[-1]
        self.own = pieces(self.count, axis.size)[axis.rank]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What a flat tensor (n,) holds for each parameter, in its shape."""
        return [
            flat.as_strided(shape, strides, start)
            for (shape, strides), start in zip(self._shapes, self._starts, strict=False)
        ]

    def cut(self, place: int) -> slice:
        """Where in this rank's cut the piece of the parameter at `place` lies."""
        first = max(self._starts[place], self.own.start)
        last = min(self._starts[place + 1], self.own.stop)
        return slice(first - self.own.start, last - self.own.start) if first < last else slice(0, 0)

    def piece_of(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """This rank's piece of a tensor like the parameter at `place`: a view, if the strides are too."""
        shape, strides = self._shapes[place]
        if whole.stride() != strides:
            whole = torch.empty_strided(shape, strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        first, cut = max(self.own.start - self._starts[place], 0), self.cut(place)
        return whole.as_strided((whole.numel(),), (1,))[first : first + cut.stop - cut.start]
