"""Marks on pieces whose gradients are on their way: who drops or changes them meanwhile is noticed.

`Optimizer.zero_grad` has no hook. But it leaves None where it found something: so a piece whose gradient
is not there yet gets a stand-in, of NaN, that takes no memory.
"""

from collections.abc import Sequence

import torch
from torch import nn

from torchpar.guards.weak_hooks import weakly


class Awaited:
    """Pieces that await a gradient, and changes of their `grad` since.

    Args:
        names, pieces: in the same order.
    """

    def __init__(self, names: Sequence[str], pieces: Sequence[nn.Parameter]):
        self._names, self._pieces = names, pieces
        # What a piece has for a gradient until then, and in which version; None: autograd added to it.
        self._seen: dict[int, tuple[torch.Tensor, int] | None] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._hooked: set[int] = set()  # by id: a deep copy of a piece has no hook

    @property
    def first(self) -> str | None:
        """The name of a piece that awaits a gradient which was not dropped, if there is one."""
        return next((self._names[p] for p in self._seen if self._pieces[p].grad is not None), None)

    def add(self, index: int) -> bool:
        """A piece awaits a gradient. Returns whether those that it awaited already were dropped.

        Raises:
            RuntimeError: somebody has changed the piece's gradient meanwhile.
        """
        piece = self._pieces[index]
        was_dropped = self.was_dropped(index)
        if piece.grad is None:
            piece.grad = self._stand_in(index)
        self._seen[index] = (piece.grad, piece.grad._version)
        return was_dropped

    def was_dropped(self, index: int) -> bool:
        """True if a piece awaited a gradient, and it was set to None since.

        Raises:
            RuntimeError: somebody has changed it.
        """
        gradient, seen = self._pieces[index].grad, self._seen.get(index)
        if gradient is not None and seen and (gradient is not seen[0] or gradient._version != seen[1]):
            raise RuntimeError(
                f"the gradient of {self._names[index]} was changed while more of it is on its way: call "
                f"finish_gradient_synchronization() before, or drop all with zero_grad() of the wrapper"
            )
        return gradient is None and index in self._seen

    def remove(self, index: int) -> None:
        """End a piece's wait: its `grad` is again the one before it."""
        self._seen.pop(index, None)
        if self._pieces[index].grad is self._stand_ins.get(index):
            self._pieces[index].grad = None

    def clear(self) -> None:
        """End all waits."""
        for index in list(self._seen):
            self.remove(index)
        # Zeros may be written to them, all the same.
        self._stand_ins = {index: nan for index, nan in self._stand_ins.items() if not nan._version}

    def has_other_hooks(self, piece: nn.Parameter) -> bool:
        """True if a piece, (n,), has tensor hooks besides the one of this class."""
        return len(piece._backward_hooks or ()) > (id(piece) in self._hooked)

    def _stand_in(self, index: int) -> torch.Tensor:
        stand_in = self._stand_ins.get(index)
        if stand_in is None:
            piece = self._pieces[index].detach()
            stand_in = self._stand_ins[index] = piece.new_full((), float("nan")).expand_as(piece)
        if id(self._pieces[index]) not in self._hooked and self._pieces[index].requires_grad:
            # A loss may also use the piece itself, to which autograd then adds.
            self._hooked.add(id(self._pieces[index]))
            self._pieces[index].register_hook(weakly(self._make_room, index))
        return stand_in

    def _make_room(self, index: int) -> None:
        if index in self._seen:
            self.was_dropped(index)
            if self._pieces[index].grad is self._stand_ins.get(index):
                self._pieces[index].grad = None
            self._seen[index] = None
