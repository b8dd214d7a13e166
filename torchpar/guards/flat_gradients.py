"""Flat gradients that notice what is done to them: dropped, changed, hooked, sparse, missing on a rank."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torchpar.guards.agreement import agree_on_use
from torchpar.guards.awaited import Awaited
from torchpar.manual.zero import flat_gradients as lesson

if TYPE_CHECKING:
    from torchpar.guards.flat_parameters import FlatParameters


class FlatGradients(lesson.FlatGradients):
    """Takes gradients in backward, and gives the pieces their parts: see the lesson's."""

    def __init__(self, flat: "FlatParameters", *, keeps_buffer: bool):
        super().__init__(flat, keeps_buffer=keeps_buffer)
        self._awaited = Awaited(self.names, self.pieces)
        self._dropped: set[int] = set()  # of those that are being summed

    @torch.no_grad()
    def add(self, index: int) -> None:
        """Take the gradient that backward left on the parameter at `index`, and add it to the buffer.

        Raises:
            RuntimeError: it is sparse, or a hook has taken it before.
        """
        parameter = self.parameters[index]
        if parameter.grad is None:
            if parameter.requires_grad:
                raise RuntimeError(f"a hook on {self.names[index]} takes its gradient away: remove the hook")
            return  # frozen between forward and backward: then it has none, as on one device
        self._require_dense(index, parameter.grad)
        if self._awaited.add(index):
            self.used.discard(index)
            self._dropped.add(index)
        super().add(index)

    def take_all(self) -> None:
        """Take those that backward left on parameters without a hook, which were frozen before."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.add(index)

    @property
    def used_here(self) -> list[bool]:
        """The parameters that have a gradient here that is still to be reduced."""
        self._forget_dropped()
        return [index in self.used or p.grad is not None for index, p in enumerate(self.parameters)]

    def use(self, used: Sequence[bool]) -> None:
        """Count as zero the gradients that other ranks alone have.

        Args:
            used: for each parameter, whether any rank has its gradient.
        """
        for index, is_used in enumerate(used):
            if is_used and index not in self.used:
                self.slot(index).zero_()
                self.used.add(index)

    def require_finished(self, what: str) -> None:
        """RuntimeError if gradients are still on their way to the pieces, before `what` needs them."""
        if self._awaited.first:
            raise RuntimeError(
                f"call finish_gradient_synchronization() before {what}: {self._awaited.first} has not got "
                f"its gradient of the last backward yet"
            )

    def require_no_hooks(self) -> None:
        """RuntimeError if a piece has a gradient hook: autograd makes no gradient for a piece."""
        for name, piece in zip(self.names, self.pieces, strict=True):
            if piece._post_accumulate_grad_hooks or self._awaited.has_other_hooks(piece):
                raise RuntimeError(
                    f"a hook on {name} would never run: its gradient is reduced, and not made by autograd, "
                    f"when finish_gradient_synchronization() is called; do there what the hook does"
                )

    @property
    def is_awaited(self) -> bool:
        """True if there are gradients that are still on their way to the pieces."""
        return self._awaited.first is not None

    @property
    def are_there(self) -> bool:
        """True if gradients of backward await their reduction."""
        self._forget_dropped()
        return super().are_there

    def drop(self, *, set_to_none: bool = True) -> None:
        """Forget gradients: those of the pieces, or make them zero, and those that were to be reduced."""
        self.wait()
        self._awaited.clear()
        self._buffer = self.full = self.shard = None
        self.used, self.ready, self.reduced = set(), set(), set()
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            gradient, parameter.grad, piece.grad = piece.grad, None, None
            if gradient is not None and not set_to_none:
                piece.grad = torch.zeros_like(gradient)

    @torch.no_grad()
    def slice_means(self) -> None:
        """Give each piece its part of a full gradient that is the mean already: a view of it."""
        for index, (parameter, piece) in enumerate(zip(self.parameters, self.pieces, strict=True)):
            gradient = parameter.grad
            self._require_dense(index, gradient)
            piece.grad = None if gradient is None else self._part_of(gradient, index)

    def hand_out(self) -> None:
        """Add its part of the shard of the mean to each piece's gradient.

        Raises:
            RuntimeError: a part belongs to a parameter that this rank did not use.
        """
        if self.shard is not None:
            self._require_used_everywhere(self.shard)
        super().hand_out()
        self._dropped.clear()

    def give(self, index: int, gradient: torch.Tensor) -> None:
        """Add a part of the mean, (n,), to the gradient of its piece, unless that was dropped meanwhile."""
        was_dropped = index in self._dropped or self._awaited.was_dropped(index)
        self._awaited.remove(index)
        if not was_dropped:
            super().give(index, gradient)
        if index in self.used:  # more is to come
            self._awaited.add(index)

    def _require_used_everywhere(self, shard: torch.Tensor) -> None:
        for index in set(range(len(self.pieces))) - self.reduced:
            if shard[self.layout.slice_of(index)].any():
                raise RuntimeError(
                    f"parameter {self.names[index]} has a gradient on other ranks and none on rank "
                    f"{self.axis.rank}: use it on every rank, or set find_unused_parameters=True"
                )

    def _forget_dropped(self) -> None:
        """Drop these gradients with an optimizer's `zero_grad`, which has no hook."""
        dropped = {index for index in self.used if self._awaited.was_dropped(index)}
        for index in dropped:
            self._awaited.remove(index)
        self.used -= dropped
        self._dropped |= dropped

    def _part_of(self, gradient: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's part of a full gradient: a view, if its strides are the parameter's."""
        like = self.layout.view(self.pieces[index].new_empty(self.layout.numel, device="meta"), index)
        if gradient.stride() != like.stride():
            gradient = torch.empty_strided(
                like.shape, like.stride(), dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,))[self.layout.elements_of(index)]

    def _require_dense(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.is_sparse:
            raise RuntimeError(f"{self.names[index]} has a sparse gradient: use a dense embedding")


def agree_on_used(several: Sequence[FlatGradients]) -> None:
    """Let all ranks reduce the gradients that any of them has, in the same order, whatever each has used."""
    if not several:
        return
    used = [gradients.used_here for gradients in several]
    axes, device = (several[0].axis, several[0].replicas), several[0].pieces[0].device
    agreed = iter(agree_on_use(list(itertools.chain(*used)), axes, device=device))
    for gradients, own in zip(several, used, strict=True):
        gradients.use(list(itertools.islice(agreed, len(own))))
