"""Parameters end to end in one flat buffer, cut over the ranks: what all of ZeRO is made of.

A `Flat` holds, for parameters of one dtype and device,

    full      the buffer of all of them; the parameters are views of it, and its storage may come and go
    shard     this rank's cut of it, which an optimizer updates
    pieces    a view of the shard for each parameter: 1-D, perhaps empty, named as the parameter is

and the same for gradients: they are added up in a flat buffer, whose sum over the ranks is scattered.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from torchpar.collectives import Axis
from torchpar.pieces import pieces
from torchpar.traffic import GRADIENTS, PARAMETERS, RECORD, REPLICATE, UNUSED
from torchpar.works import Work


class Flat:
    """Some parameters, cut over an axis. They keep their identity: hooks and tied uses stay.

    Args:
        named: of one dtype and device, by name; their values become those of the first rank.
        axis: the ranks that share them out.
        replicas: ranks that hold the same shard, or None: gradients are averaged over both axes.
        keeps_full: the buffer stays in memory, and the shard is a view of it (ZeRO-1 and 2).
        keeps_gradients: the buffer of gradients stays until `drop_gradients` (ZeRO-1).
        compute_dtype: of the parameters while they are whole; None for that of the shard.

    Attributes:
        names, parameters, pieces: in the same order.
        full: the flat buffer (n,), without memory while `is_whole` is false and it is not kept.
        is_whole: the parameters hold what the optimizers of all ranks made of them.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        axis: Axis,
        *,
        replicas: Axis | None = None,
        keeps_full: bool = False,
        keeps_gradients: bool = False,
        compute_dtype: torch.dtype | None = None,
    ):
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.axis, self.replicas = axis, replicas
        self.keeps_gradients = keeps_gradients
        # Strides like the parameter's, where it is dense: what kernels and autograd expect of it.
        self._places = [(p.shape, torch.empty_like(p, device="meta").stride()) for p in self.parameters]
        self._starts = list(itertools.accumulate((p.numel() for p in self.parameters), initial=0))
        self.own = pieces(self._starts[-1], axis.size)[axis.rank]
        whole = self._broadcast_whole()
        is_cast = compute_dtype not in (None, whole.dtype)
        self.keeps_full = keeps_full and not is_cast
        self.full = whole.to(compute_dtype) if is_cast else whole
        self.shard = self.full[self.own] if self.keeps_full else whole[self.own].clone()
        self.pieces = [
            nn.Parameter(self.shard[self._cut(place)], requires_grad=parameter.requires_grad)
            for place, parameter in enumerate(self.parameters)
        ]
        for parameter, view in zip(self.parameters, self.views(self.full), strict=True):
            parameter.data = view
        self.is_whole = True
        self._gather: Work | None = None
        self._gradients: torch.Tensor | None = None  # those that backward is adding up
        self._used: set[int] = set()  # places that have one
        self._reduction: Work | None = None
        self._sent: torch.Tensor | None = None  # the gradients that are being summed over the ranks
        self._reduced: torch.Tensor | None = None  # this rank's cut of the sum
        self._reduced_places: set[int] = set()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What a flat tensor (n,) holds for each parameter, in its shape."""
        return [
            flat.as_strided(shape, strides, start)
            for (shape, strides), start in zip(self._places, self._starts, strict=False)
        ]

    def gather(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Whole tensors in the parameters' shapes from every rank's pieces of them: for the record."""
        piece = torch.cat([value.reshape(-1) for value in values])
        flat = piece.new_empty(self._starts[-1])
        self.axis.all_gather(flat, piece, purpose=RECORD)
        return self.views(flat)

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to make the parameters whole; they are after `finish_gather`."""
        if self.is_whole or self._gather:
            return
        if not self.keeps_full:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
            self.full[self.own] = self.shard
        mine = self.full[self.own]
        self._gather = self.axis.start_all_gather(self.full, mine, purpose=PARAMETERS)

    def finish_gather(self) -> None:
        """Wait until the parameters are whole."""
        if self._gather:
            self._gather.wait()
            self._gather, self.is_whole = None, True

    def free(self) -> None:
        """The parameters are no longer whole, and cost no memory unless they are kept."""
        self.finish_gather()
        self.is_whole = False
        if not self.keeps_full:
            # Not a new tensor: what autograd saved for backward are views of this storage.
            self.full.untyped_storage().resize_(0)

    @torch.no_grad()
    def add_gradient(self, place: int) -> None:
        """Take the gradient that backward left on the parameter at `place`, and add it to the buffer."""
        parameter = self.parameters[place]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._require_dense(place, gradient)
        if self._gradients is None:
            self._gradients = self.shard.new_empty(self._starts[-1])
        slot = self.views(self._gradients)[place]
        self.accumulate(slot, gradient, is_first=place not in self._used)
        self._used.add(place)

    @staticmethod
    def accumulate(slot: torch.Tensor, gradient: torch.Tensor, *, is_first: bool) -> None:
        """Add one pass's gradient to those of the passes before it."""
        if is_first:
            slot.copy_(gradient)
        else:
            slot.add_(gradient)

    def take_gradients(self) -> None:
        """Take those that backward left on parameters without a hook, which were frozen before."""
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.add_gradient(place)

    @property
    def used(self) -> list[bool]:
        """Which parameters have a gradient here that is still to be reduced."""
        return [place in self._used or p.grad is not None for place, p in enumerate(self.parameters)]

    def drop_gradients(self, *, set_to_none: bool = True) -> None:
        """Forget gradients: those of the pieces, or make them zero, and those that were to be reduced."""
        if self._reduction:
            self._reduction.wait()
        self._gradients, self._used = None, set()
        self._reduction = self._sent = self._reduced = None
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            parameter.grad = None
            if set_to_none:
                piece.grad = None
            elif piece.grad is not None:
                piece.grad = torch.zeros_like(piece.grad)

    @torch.no_grad()
    def take_mean_gradients(self) -> None:
        """Give each piece its part of a whole gradient that is the mean already: a view of it."""
        for place, (parameter, piece) in enumerate(zip(self.parameters, self.pieces, strict=True)):
            gradient, (shape, strides) = parameter.grad, self._places[place]
            self._require_dense(place, gradient)
            if gradient is not None and gradient.stride() != strides:
                gradient = torch.empty_strided(shape, strides, dtype=piece.dtype).copy_(gradient)
            piece.grad = None
            if gradient is not None:
                flat = gradient.as_strided((gradient.numel(),), (1,))
                first = max(self.own.start - self._starts[place], 0)
                piece.grad = flat[first : first + piece.numel()]

    @torch.no_grad()
    def start_reduction(self, used: Sequence[bool] | None = None) -> None:
        """Begin to sum the gradients over the ranks; without any on this step there is nothing to do.

        Args:
            used: which parameters have a gradient on any rank, if the ranks have agreed on that; else all
                have the same.
        """
        places = self._used if used is None else {place for place, is_used in enumerate(used) if is_used}
        if not places:
            return
        self.finish_reduction()  # of a backward before, if nobody has asked for its gradients yet
        if self._gradients is None:
            self._gradients = self.shard.new_empty(self._starts[-1])
        for place, slot in enumerate(self.views(self._gradients)):
            if place not in self._used:
                slot.zero_()
        self._sent, self._reduced_places = self._gradients, places
        self._gradients, self._used = None, set()
        mine = self._sent[self.own]
        self._reduced = mine if self.keeps_gradients else torch.empty_like(mine)
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
            return
        if self._reduction:
            self._reduction.wait()
        self._reduced /= self.axis.size * (self.replicas.size if self.replicas else 1)
        for place, piece in enumerate(self.pieces):
            gradient = self._reduced[self._cut(place)]
            if place in self._reduced_places:
                piece.grad = gradient if piece.grad is None else piece.grad + gradient
            elif gradient.any():
                raise RuntimeError(
                    f"parameter {self.names[place]} has a gradient on other ranks and none on rank "
                    f"{self.axis.rank}: use it on every rank, or set find_unused_parameters=True"
                )
        self._reduction = self._reduced = None

    @torch.no_grad()
    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Give the pieces their parts of whole tensors. ValueError if one has not its parameter's shape."""
        whole = self.shard.new_empty(self._starts[-1])
        for name, view, value in zip(self.names, self.views(whole), values, strict=True):
            if value.shape != view.shape:
                raise ValueError(f"{name} is {tuple(view.shape)}, and the state has {tuple(value.shape)}")
            view.copy_(value)
        self.shard.copy_(whole[self.own])

    def _require_dense(self, place: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.is_sparse:
            raise RuntimeError(f"{self.names[place]} has a sparse gradient: use a dense embedding")

    def _cut(self, place: int) -> slice:
        """Where in the shard the piece of the parameter at `place` lies."""
        first = max(self._starts[place], self.own.start)
        last = min(self._starts[place + 1], self.own.stop)
        return slice(first - self.own.start, last - self.own.start) if first < last else slice(0, 0)

    @torch.no_grad()
    def _broadcast_whole(self) -> torch.Tensor:
        whole = self.parameters[0].detach().new_empty(self._starts[-1])
        for view, parameter in zip(self.views(whole), self.parameters, strict=True):
            view.copy_(parameter)
        for axis in (self.axis, self.replicas):
            if axis and axis.size > 1:
                axis.broadcast(whole, purpose=REPLICATE)
        return whole


def agree_on_use(flats: Sequence[Flat]) -> list[list[bool]]:
    """For each flat, which of its parameters have a gradient on any rank: one small all-reduce.

    What ranks then reduce is the same on all of them, and in the same order, whatever each of them used.
    """
    if not flats:
        return []
    used = [is_used for flat in flats for is_used in flat.used]
    flags = torch.tensor(used, dtype=torch.int32, device=flats[0].full.device)
    for axis in (flats[0].axis, flats[0].replicas):
        if axis and axis.size > 1:
            axis.all_reduce(flags, purpose=UNUSED, op="max")
    return [part.bool().tolist() for part in flags.split([len(flat.parameters) for flat in flats])]


def make_flats(named: Sequence[tuple[str, nn.Parameter]], axis: Axis, **options) -> list[Flat]:
    """Flats of some parameters: one for each dtype and device, frozen ones apart. Options: those of Flat."""
    kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        kinds.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(
            (name, parameter)
        )
    return [Flat(group, axis, **options) for group in kinds.values()]
