"""Parameters end to end in one flat buffer, cut over the ranks: what all of ZeRO is made of.

A `Flat` holds, for parameters of one dtype and device,

    full      the buffer of all of them; the parameters are views of it, and its storage may come and go
    shard     this rank's cut of it, which an optimizer updates
    pieces    a view of the shard for each parameter: 1-D, perhaps empty, named as the parameter is

and the same for their gradients (`flat_gradients`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from compare.contract.communication import PARAMETERS, RECORD, REPLICATE
from torchpar.comm.collectives import Axis
from torchpar.comm.handles import Work
from torchpar.manual.zero.flat_gradients import FlatGradients
from torchpar.manual.zero.flat_layout import Places

Kind = Literal["pieces", "parameters"]


class Flat:
    """Some parameters, cut over an axis. They keep their identity: hooks and tied uses stay.

    Args:
        named: of one dtype and device, by name; their values become those of the first rank.
        axis: the ranks that share them out.
        replicas: ranks that hold the same shard, or None: gradients are averaged over both axes.
        keeps_full: the buffer stays in memory, and the shard is a view of it (ZeRO-1 and 2).
        keeps_gradients: the buffer of gradients stays until they are dropped (ZeRO-1).
        compute_dtype: of the parameters while they are whole; None for that of the shard.
        whole: their values in a flat buffer, in the place of the first rank's; nothing is sent then.

    Attributes:
        names, parameters, pieces: in the same order.
        places: where each parameter lies in the buffer, and its piece in the shard.
        gradients: of the parameters.
        full: the flat buffer (n,), without memory while `is_whole` is false and it is not kept.
        is_whole: the parameters hold what the optimizers of all ranks made of them, when they were gathered.
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
        whole: torch.Tensor | None = None,
    ):
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.axis, self.replicas = axis, replicas
        self.places = Places(self.parameters, axis)
        self._make: Callable[..., Flat] = functools.partial(  # one like this
            Flat,
            axis=axis,
            replicas=replicas,
            keeps_full=keeps_full,
            keeps_gradients=keeps_gradients,
            compute_dtype=compute_dtype,
        )
        whole = self._broadcast_whole() if whole is None else whole
        is_cast = compute_dtype not in (None, whole.dtype)
        self.keeps_full = keeps_full and not is_cast
        self.full = whole.to(compute_dtype) if is_cast else whole
        # `data`: a version of its own, which tells of writes to the shard and not of gathers.
        self.shard = self.full[self.places.own].data if self.keeps_full else whole[self.places.own].clone()
        self.pieces = [
            nn.Parameter(self.shard[self.places.cut(place)], requires_grad=parameter.requires_grad)
            for place, parameter in enumerate(self.parameters)
        ]
        for parameter, view in zip(self.parameters, self.places.views(self.full), strict=True):
            parameter.data = view
        self.is_whole = True
        self._gather: Work | None = None
        self._gathered_version = self.version
        kinds: tuple[Kind, ...] = ("pieces", "parameters")
        self._addresses = {kind: [_memory(tensor) for tensor in self._tensors(kind)] for kind in kinds}
        self.gradients = FlatGradients(
            self.names,
            self.parameters,
            self.pieces,
            places=self.places,
            axis=axis,
            replicas=replicas,
            keeps_buffer=keeps_gradients,
        )

    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> "Flat":
        """The same cut over the same axes in memory of its own: at rest, without gradients or hooks.

        Parameters that were copied before, with their module, become this copy's.

        Raises:
            ValueError: an optimizer over the pieces was copied before.
        """
        if any(id(piece) in memo for piece in self.pieces):
            raise ValueError(
                "an optimizer was copied before the FSDP module whose pieces it updates: copy the module "
                "first, as in copy.deepcopy((module, optimizer))"
            )
        self.finish_gather()
        if self.keeps_full:
            whole = self.full.clone()
        else:
            whole = self.shard.new_empty(self.places.count)
            whole[self.places.own] = self.shard
        views = zip(self.parameters, self.places.views(whole), strict=True)
        # Not the view itself: a parameter of its own version, which autograd compares.
        parameters = [memo.setdefault(id(p), nn.Parameter(v.data, p.requires_grad)) for p, v in views]
        named = list(zip(self.names, parameters, strict=True))
        copied = memo[id(self)] = self._make(named, whole=whole)
        for original, piece in zip(self.pieces, copied.pieces, strict=True):
            memo[id(original)] = piece.requires_grad_(original.requires_grad)
        if not self.is_whole or self.is_changed:
            copied.free()
        return copied

    @property
    def version(self) -> int:
        """Counts the writes to the shard and its pieces; not those through `data`."""
        return self.shard._version

    @property
    def is_changed(self) -> bool:
        """Whether the shard was written to since the parameters were gathered from it."""
        return self.shard._version != self._gathered_version

    @property
    def is_stale(self) -> bool:
        """Whether the parameters are whole, or about to be, but not what the shards are by now."""
        return self.is_changed and (self.is_whole or self._gather is not None)

    @torch.no_grad()
    def keep_memory(self, kind: Kind) -> None:
        """Give pieces or parameters their memory back where somebody replaced it, and take in its values.

        `module.double().float()` and `vector_to_parameters` replace it: nobody else would see the new one.

        Raises:
            RuntimeError: they have another shape, dtype or device now.
        """
        for place, tensor in enumerate(self._tensors(kind)):
            if _memory(tensor) != self._addresses[kind][place]:
                self._take_back(kind, place, tensor)

    def gather(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Whole tensors in the parameters' shapes from every rank's pieces of them: for the record."""
        piece = torch.cat([value.reshape(-1) for value in values])
        flat = piece.new_empty(self.places.count)
        self.axis.all_gather(flat, piece, purpose=RECORD)
        return self.places.views(flat)

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to make the parameters whole; they are after `finish_gather`."""
        if self.is_stale:
            self.finish_gather()
            self.is_whole = False
        if self.is_whole or self._gather:
            return
        self._gathered_version = self.version
        if not self.keeps_full:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
            self.full[self.places.own] = self.shard
        mine = self.full[self.places.own]
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
    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Give the pieces their parts of whole tensors. ValueError if one has not its parameter's shape."""
        whole = self.shard.new_empty(self.places.count)
        for name, view, value in zip(self.names, self.places.views(whole), values, strict=True):
            if value.shape != view.shape:
                raise ValueError(f"{name} is {tuple(view.shape)}, and the state has {tuple(value.shape)}")
            view.copy_(value)
        self.keep_memory("pieces")
        self.shard.copy_(whole[self.places.own])
        if not self.is_whole:
            self._gathered_version = self.version  # no update that gradients under way were meant for

    def _tensors(self, kind: Kind) -> Sequence[nn.Parameter]:
        return self.pieces if kind == "pieces" else self.parameters

    def _take_back(self, kind: Kind, place: int, tensor: nn.Parameter) -> None:
        is_piece = kind == "pieces"
        own = self.shard[self.places.cut(place)] if is_piece else self.places.views(self.full)[place]
        now, then = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (tensor, own))
        if now != then:
            raise RuntimeError(
                f"{self.names[place]} is {now} now, and was {then} when it was sharded: convert the module "
                f"before that, or wrap it anew"
            )
        own.copy_(tensor)
        tensor.data = own
        self._addresses[kind][place] = _memory(tensor)

    @torch.no_grad()
    def _broadcast_whole(self) -> torch.Tensor:
        whole = self.parameters[0].detach().new_empty(self.places.count)
        for view, parameter in zip(self.places.views(whole), self.parameters, strict=True):
            view.copy_(parameter)
        for axis in (self.axis, self.replicas):
            if axis and axis.size > 1:
                axis.broadcast(whole, purpose=REPLICATE)
        return whole


def _memory(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    """Tells whether it is the same memory as before: the check of every step, so a cheap one."""
    return tensor.data_ptr(), tensor.dtype


def make_flats(named: Sequence[tuple[str, nn.Parameter]], axis: Axis, **options) -> list[Flat]:
    """Flats of some parameters: one for each dtype and device, frozen ones apart. Options: those of Flat."""
    kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        kinds.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(
            (name, parameter)
        )
    return [Flat(group, axis, **options) for group in kinds.values()]
