"""Flat gradient buffers for ZeRO: backward adds to them, and pieces get their parts of this rank's shard."""

from typing import TYPE_CHECKING

import torch

from torchpar.comm.handles import Work

if TYPE_CHECKING:
    from torchpar.manual.zero.flat_parameters import FlatParameters


class FlatGradients:
    """Takes gradients from parameters in backward, and gives the pieces their parts of this rank's shard.

    The strategy sums them over the ranks in between: it asks whether they `are_there`, takes the tensors of
    `begin_reduction`, and calls `hand_out` in the end.

    Args:
        flat: whose parameters' gradients these are.
        keeps_buffer: of all gradients, until they are dropped: the pieces' are views of it.

    Attributes:
        used: indices of the parameters that have a gradient here which is still to be reduced.
        ready: indices of those whose gradient of the step's last backward is there.
        full: the gradients (n,) that are being summed over the ranks, or None.
        shard: this rank's cut of the sum, from `begin_reduction` to `hand_out`.
        reduced: indices that have a part in it.
        work: the collective under way, or None.
        ranks: over how many the mean is.
    """

    def __init__(self, flat: "FlatParameters", *, keeps_buffer: bool):
        self.names, self.parameters, self.pieces = flat.names, flat.parameters, flat.pieces
        self.layout, self.axis, self.replicas = flat.layout, flat.axis, flat.replicas
        self.ranks = self.axis.size * (self.replicas.size if self.replicas else 1)
        self._keeps_buffer = keeps_buffer
        self._buffer: torch.Tensor | None = None  # of what backward is adding up
        self.used, self.ready, self.reduced = set[int](), set[int](), set[int]()
        self.full: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.work: Work | None = None

    @torch.no_grad()
    def add(self, index: int) -> None:
        """Take the gradient that backward left on the parameter at `index`, and add it to the buffer."""
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        slot = self.slot(index)
        if index in self.used:
            slot.add_(gradient)
        else:
            slot.copy_(gradient)
            self.used.add(index)

    def slot(self, index: int) -> torch.Tensor:
        """The buffer's slot for the gradient of the parameter at `index`: a view of its shape."""
        if self._buffer is None:
            self._buffer = self.pieces[0].detach().new_empty(self.layout.numel)
        return self.layout.view(self._buffer, index)

    @property
    def is_full(self) -> bool:
        """True if the step's last backward has left every gradient."""
        return all(n in self.ready for n, p in enumerate(self.parameters) if p.requires_grad)

    @property
    def are_there(self) -> bool:
        """True if backward has left gradients that are to be reduced."""
        return bool(self.used)

    def begin_reduction(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's shard (to be filled with the sum's), and the full gradients (n,).

        The reduction before this one has been handed out.
        """
        for index in set(range(len(self.parameters))) - self.used:
            self.slot(index).zero_()
        full, self._buffer = self._buffer, None
        assert full is not None
        own = full[self.layout.own]
        self.full, self.shard = full, own if self._keeps_buffer else torch.empty_like(own)
        self.reduced, self.used, self.ready = self.used, set(), set()
        return self.shard, full

    def wait(self) -> None:
        """Wait for the collective under way, if there is one."""
        if self.work:
            self.work.wait()
        self.work = None

    def hand_out(self) -> None:
        """Give each piece, (n,), its part of the shard of the mean."""
        for index in sorted(self.reduced):
            assert self.shard is not None
            self.give(index, self.shard[self.layout.slice_of(index)])
        self.shard, self.reduced = None, set()

    def give(self, index: int, gradient: torch.Tensor) -> None:
        """Add a part of the mean, (n,) as the piece, to the gradient that the piece has already."""
        piece = self.pieces[index]
        piece.grad = gradient if piece.grad is None else piece.grad + gradient
