"""The gradients of a `Flat`: added up in a flat buffer, whose sum over the ranks is scattered to pieces."""

from collections.abc import Sequence

import torch
from torch import nn

from compare.contract.communication import GRADIENTS, UNUSED
from torchpar.comm.collectives import Axis
from torchpar.comm.handles import Work
from torchpar.manual.any_module.awaited import Awaited
from torchpar.manual.zero.flat_layout import Places


class FlatGradients:
    """Takes gradients from parameters in backward, and leaves each rank its part of the mean on the pieces.

    Args:
        names, parameters, pieces: in the same order.
        places: where they lie.
        axis: the ranks that share them out.
        replicas: ranks that hold the same pieces, or None.
        keeps_buffer: of all gradients, until they are dropped: the pieces' are views of it.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        pieces: Sequence[nn.Parameter],
        *,
        places: Places,
        axis: Axis,
        replicas: Axis | None,
        keeps_buffer: bool,
    ):
        self._names, self._parameters, self._pieces = names, parameters, pieces
        self._places, self.axis, self.replicas = places, axis, replicas
        self._keeps_buffer = keeps_buffer
        self._buffer: torch.Tensor | None = None  # of what backward is adding up
        self._used: set[int] = set()  # places that have a gradient there
        self._reduction: Work | None = None
        self._sent: torch.Tensor | None = None  # the gradients that are being summed over the ranks
        self._reduced: torch.Tensor | None = None  # this rank's cut of the sum
        self._reduced_places: set[int] = set()
        self._awaited = Awaited(names, pieces)
        self._dropped: set[int] = set()  # of those that are being summed

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._pieces[0].device

    @torch.no_grad()
    def add(self, place: int) -> None:
        """Take the gradient that backward left on the parameter at `place`, and add it to the buffer.

        Raises:
            RuntimeError: it is sparse, or a hook has taken it before.
        """
        parameter = self._parameters[place]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            if parameter.requires_grad:
                raise RuntimeError(f"a hook on {self._names[place]} takes its gradient away: remove the hook")
            return  # frozen between forward and backward: then it has none, as on one device
        self._require_dense(place, gradient)
        if self._awaited.add(place):
            self._used.discard(place)
            self._dropped.add(place)
        if self._buffer is None:
            self._buffer = self._pieces[0].detach().new_empty(self._places.count)
        slot = self._places.views(self._buffer)[place]
        self.accumulate(slot, gradient, is_first=place not in self._used)
        self._used.add(place)

    @staticmethod
    def accumulate(slot: torch.Tensor, gradient: torch.Tensor, *, is_first: bool) -> None:
        """Add one pass's gradient to those of the passes before it."""
        if is_first:
            slot.copy_(gradient)
        else:
            slot.add_(gradient)

    def take_all(self) -> None:
        """Take those that backward left on parameters without a hook, which were frozen before."""
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self.add(place)

    @property
    def used(self) -> list[bool]:
        """Which parameters have a gradient here that is still to be reduced."""
        self._forget_dropped()
        return [place in self._used or p.grad is not None for place, p in enumerate(self._parameters)]

    def require_finished(self, what: str) -> None:
        """RuntimeError if gradients are still on their way to the pieces, before `what` needs them."""
        if self._awaited.first:
            raise RuntimeError(
                f"call finish_gradient_synchronization() before {what}: {self._awaited.first} has not got "
                f"its gradient of the last backward yet"
            )

    @property
    def is_awaited(self) -> bool:
        """Whether there are gradients that are still on their way to the pieces."""
        return self._awaited.first is not None

    def drop(self, *, set_to_none: bool = True) -> None:
        """Forget gradients: those of the pieces, or make them zero, and those that were to be reduced."""
        if self._reduction:
            self._reduction.wait()
        self._buffer, self._used = None, set()
        self._reduction = self._sent = self._reduced = None
        self._awaited.clear()
        for parameter, piece in zip(self._parameters, self._pieces, strict=True):
            parameter.grad = None
            if set_to_none:
                piece.grad = None
            elif piece.grad is not None:
                piece.grad = torch.zeros_like(piece.grad)

    @torch.no_grad()
    def take_means(self) -> None:
        """Give each piece its part of a whole gradient that is the mean already: a view of it."""
        for place, (parameter, piece) in enumerate(zip(self._parameters, self._pieces, strict=True)):
            gradient = parameter.grad
            self._require_dense(place, gradient)
            piece.grad = None if gradient is None else self._places.piece_of(gradient, place)

    @torch.no_grad()
    def start_reduction(self, used: Sequence[bool] | None = None) -> None:
        """Begin to sum the gradients over the ranks; without any on this step there is nothing to do.

        Args:
            used: which parameters have a gradient on any rank, if the ranks have agreed on that; else all
                have the same.
        """
        self._forget_dropped()
        places = self._used if used is None else {place for place, is_used in enumerate(used) if is_used}
        if not places:
            return
        self.finish_reduction()  # of a backward before, if nobody has asked for its gradients yet
        if self._buffer is None:
            self._buffer = self._pieces[0].detach().new_empty(self._places.count)
        for place, slot in enumerate(self._places.views(self._buffer)):
            if place not in self._used:
                slot.zero_()
        self._sent, self._reduced_places = self._buffer, places
        self._buffer, self._used = None, set()
        mine = self._sent[self._places.own]
        self._reduced = mine if self._keeps_buffer else torch.empty_like(mine)
        self._reduction = self.axis.start_reduce_scatter(self._reduced, self._sent, purpose=GRADIENTS)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the sum over the shards, let the whole gradients go, and begin that over the replicas."""
        if self._sent is None or self._reduced is None or self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = self._sent = None
        if self.replicas and self.replicas.size > 1:
            self._reduction = self.replicas.start_all_reduce(self._reduced, purpose=GRADIENTS)

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Leave each piece its part of the mean gradient, added to one that is there already.

        Raises:
            RuntimeError: a part of the sum belongs to a parameter that this rank did not use.
        """
        self.settle()
        if self._reduced is None:
            self._dropped.clear()
            return
        if self._reduction:
            self._reduction.wait()
        self._reduced /= self.axis.size * (self.replicas.size if self.replicas else 1)
        for place, piece in enumerate(self._pieces):
            gradient = self._reduced[self._places.cut(place)]
            if place in self._reduced_places:
                self._hand_out(place, piece, gradient)
            elif gradient.any():
                raise RuntimeError(
                    f"parameter {self._names[place]} has a gradient on other ranks and none on rank "
                    f"{self.axis.rank}: use it on every rank, or set find_unused_parameters=True"
                )
        self._reduction = self._reduced = None
        self._dropped.clear()

    def _hand_out(self, place: int, piece: nn.Parameter, gradient: torch.Tensor) -> None:
        was_dropped = place in self._dropped or self._awaited.was_dropped(place)
        self._awaited.remove(place)
        if not was_dropped:
            piece.grad = gradient if piece.grad is None else piece.grad + gradient
        if place in self._used:  # more is to come
            self._awaited.add(place)

    def _forget_dropped(self) -> None:
        """An optimizer's `zero_grad` tells nobody, but is to drop these gradients, too."""
        dropped = {place for place in self._used if self._awaited.was_dropped(place)}
        for place in dropped:
            self._awaited.remove(place)
        self._used -= dropped
        self._dropped |= dropped

    def _require_dense(self, place: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.is_sparse:
            raise RuntimeError(f"{self._names[place]} has a sparse gradient: use a dense embedding")


def agree_on_use(several: Sequence[FlatGradients]) -> list[list[bool]]:
    """For each of these, which of its parameters have a gradient on any rank: one small all-reduce.

    What ranks then reduce is the same on all of them, and in the same order, whatever each of them used.
    """
    if not several:
        return []
    used = [is_used for gradients in several for is_used in gradients.used]
    flags = torch.tensor(used, dtype=torch.int32, device=several[0].device)
    for axis in (several[0].axis, several[0].replicas):
        if axis and axis.size > 1:
            axis.all_reduce(flags, purpose=UNUSED, op="max")
    return [part.bool().tolist() for part in flags.split([len(gradients.used) for gradients in several])]
