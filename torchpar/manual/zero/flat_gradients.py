"""Flat gradient buffers for ZeRO: backward adds to them, and pieces get their parts of this rank's shard."""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from torchpar.comm.collectives import Axis
from torchpar.comm.handles import Work
from torchpar.guards.agreement import agree_on_use
from torchpar.guards.awaited import Awaited
from torchpar.manual.zero.flat_layout import FlatLayout


class FlatGradients:
    """Takes gradients from parameters in backward, and gives the pieces their parts of this rank's shard.

    The strategy sums them over the ranks in between: it asks `to_reduce`, takes `begin_reduction`'s tensors,
    and calls `hand_out` in the end.

    Args:
        names, parameters, pieces: in the same order.
        layout: where they lie.
        axis: the ranks that share them out.
        replicas: ranks that hold the same pieces, or None.
        keeps_buffer: of all gradients, until they are dropped: the pieces' are views of it.

    Attributes:
        work: the collective under way, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        pieces: Sequence[nn.Parameter],
        *,
        layout: FlatLayout,
        axis: Axis,
        replicas: Axis | None,
        keeps_buffer: bool,
    ):
        self._names, self._parameters, self._pieces = names, parameters, pieces
        self._layout, self.axis, self.replicas = layout, axis, replicas
        self._keeps_buffer = keeps_buffer
        self._buffer: torch.Tensor | None = None  # of what backward is adding up
        self._used: set[int] = set()  # indices that have a gradient there
        self.work: Work | None = None
        self._full: torch.Tensor | None = None  # the gradients that are being summed over the ranks
        self._shard: torch.Tensor | None = None  # this rank's cut of the sum
        self._reduced: set[int] = set()  # indices that have a part in it
        self._awaited = Awaited(names, pieces)
        self._dropped: set[int] = set()  # of those that are being summed

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self._pieces[0].device

    @torch.no_grad()
    def add(self, index: int) -> None:
        """Take the gradient that backward left on the parameter at `index`, and add it to the buffer.

        Raises:
            RuntimeError: it is sparse, or a hook has taken it before.
        """
        parameter = self._parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            if parameter.requires_grad:
                raise RuntimeError(f"a hook on {self._names[index]} takes its gradient away: remove the hook")
            return  # frozen between forward and backward: then it has none, as on one device
        self._require_dense(index, gradient)
        if self._awaited.add(index):
            self._used.discard(index)
            self._dropped.add(index)
        if self._buffer is None:
            self._buffer = self._make_buffer()
        slot = self._layout.view(self._buffer, index)
        if index in self._used:
            slot.add_(gradient)
        else:
            slot.copy_(gradient)
            self._used.add(index)

    def take_all(self) -> None:
        """Take those that backward left on parameters without a hook, which were frozen before."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self.add(index)

    @property
    def trainable(self) -> list[int]:
        """Indices of the parameters that are to get a gradient."""
        return [index for index, parameter in enumerate(self._parameters) if parameter.requires_grad]

    @property
    def used(self) -> list[bool]:
        """The parameters that have a gradient here that is still to be reduced."""
        self._forget_dropped()
        return [index in self._used or p.grad is not None for index, p in enumerate(self._parameters)]

    def require_finished(self, what: str) -> None:
        """RuntimeError if gradients are still on their way to the pieces, before `what` needs them."""
        if self._awaited.first:
            raise RuntimeError(
                f"call finish_gradient_synchronization() before {what}: {self._awaited.first} has not got "
                f"its gradient of the last backward yet"
            )

    def require_no_hooks(self) -> None:
        """RuntimeError if somebody waits for a piece's gradient with a hook: autograd makes none for it."""
        for name, piece in zip(self._names, self._pieces, strict=True):
            if piece._post_accumulate_grad_hooks or self._awaited.has_other_hooks(piece):
                raise RuntimeError(
                    f"a hook on {name} would never run: its gradient is reduced, and not made by autograd, "
                    f"when finish_gradient_synchronization() is called; do there what the hook does"
                )

    @property
    def is_awaited(self) -> bool:
        """True if there are gradients that are still on their way to the pieces."""
        return self._awaited.first is not None

    def drop(self, *, set_to_none: bool = True) -> None:
        """Forget gradients: those of the pieces, or make them zero, and those that were to be reduced."""
        self.wait()
        self._buffer, self._used = None, set()
        self._full = self._shard = None
        self._awaited.clear()
        for parameter, piece in zip(self._parameters, self._pieces, strict=True):
            parameter.grad = None
            if set_to_none:
                piece.grad = None
            elif piece.grad is not None:
                piece.grad = torch.zeros_like(piece.grad)

    @torch.no_grad()
    def slice_means(self) -> None:
        """Give each piece its part of a full gradient that is the mean already: a view of it."""
        for index, (parameter, piece) in enumerate(zip(self._parameters, self._pieces, strict=True)):
            gradient = parameter.grad
            self._require_dense(index, gradient)
            piece.grad = None if gradient is None else self._layout.piece_of(gradient, index)

    @property
    def ranks(self) -> int:
        """Over how many the mean is."""
        return self.axis.size * (self.replicas.size if self.replicas else 1)

    def to_reduce(self, used: Sequence[bool] | None = None) -> set[int]:
        """Indices of the parameters whose gradients are to be reduced now; none, if backward left none.

        Args:
            used: which parameters have a gradient on any rank, if the ranks have agreed on that; else all
                have the same.
        """
        self._forget_dropped()
        return self._used if used is None else {index for index, is_used in enumerate(used) if is_used}

    def begin_reduction(self, indices: set[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's shard (to be filled with the sum's), and the full gradients: flat tensors.

        Args:
            indices: from `to_reduce`, not empty. The reduction before this one must be handed out.
        """
        full = self._make_buffer() if self._buffer is None else self._buffer
        for index in set(range(len(self._parameters))) - self._used:
            self._layout.view(full, index).zero_()
        self._full, self._reduced = full, indices
        self._buffer, self._used = None, set()
        own = full[self._layout.own]
        self._shard = own if self._keeps_buffer else torch.empty_like(own)
        return self._shard, full

    def wait_reduce_scatter(self) -> torch.Tensor | None:
        """Wait for the shard's sum, and free the full gradients. Returns the shard; None, if that is done."""
        if self._full is None or self.work is None:
            return None
        self.wait()
        self._full = None
        return self._shard

    def wait(self) -> torch.Tensor | None:
        """Wait for the collective under way. Returns the shard that is to be handed out, if there is one."""
        if self.work:
            self.work.wait()
        self.work = None
        return self._shard

    def hand_out(self) -> None:
        """Give each piece its part of the shard, which is the mean by now, added to what is there already.

        Raises:
            RuntimeError: a part belongs to a parameter that this rank did not use.
        """
        if self._shard is not None:
            for index in range(len(self._pieces)):
                self._hand_out(index, self._shard[self._layout.slice_of(index)])
        self._shard = None
        self._dropped.clear()

    def _hand_out(self, index: int, gradient: torch.Tensor) -> None:
        if index not in self._reduced:
            if gradient.any():
                raise RuntimeError(
                    f"parameter {self._names[index]} has a gradient on other ranks and none on rank "
                    f"{self.axis.rank}: use it on every rank, or set find_unused_parameters=True"
                )
            return
        piece = self._pieces[index]
        was_dropped = index in self._dropped or self._awaited.was_dropped(index)
        self._awaited.remove(index)
        if not was_dropped:
            piece.grad = gradient if piece.grad is None else piece.grad + gradient
        if index in self._used:  # more is to come
            self._awaited.add(index)

    def _forget_dropped(self) -> None:
        """Drop these gradients with an optimizer's `zero_grad`, which has no hook."""
        dropped = {index for index in self._used if self._awaited.was_dropped(index)}
        for index in dropped:
            self._awaited.remove(index)
        self._used -= dropped
        self._dropped |= dropped

    def _make_buffer(self) -> torch.Tensor:
        return self._pieces[0].detach().new_empty(self._layout.numel)

    def _require_dense(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.is_sparse:
            raise RuntimeError(f"{self._names[index]} has a sparse gradient: use a dense embedding")


def used_on_any_rank(several: Sequence[FlatGradients]) -> list[list[bool]]:
    """For each of these, which of its parameters have a gradient on any rank.

    What ranks then reduce is the same on all of them, and in the same order, whatever each of them used.
    """
    if not several:
        return []
    used = [gradients.used for gradients in several]
    axes = (several[0].axis, several[0].replicas)
    agreed = iter(agree_on_use(list(itertools.chain(*used)), axes, device=several[0].device))
    return [list(itertools.islice(agreed, len(own))) for own in used]
