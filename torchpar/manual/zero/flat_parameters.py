"""Flat parameter buffers, cut over the ranks: the memory of all of ZeRO.

`FlatParameters` hold, for parameters of one dtype and device,

    full      the buffer of all of them; the parameters are views of it, and its storage may come and go
    shard     this rank's cut of it, which an optimizer updates
    pieces    a view of the shard for each parameter: 1-D, perhaps empty, named as the parameter is

and the same for their gradients (`flat_gradients`). What moves between the ranks, and when the buffer has
memory, is the strategy's: `fully_sharded.unshard` and `reshard`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from torchpar.comm.collectives import Axis
from torchpar.comm.handles import Work
from torchpar.manual.packs import pack
from torchpar.manual.replicate import replicate
from torchpar.manual.zero.flat_gradients import FlatGradients
from torchpar.manual.zero.flat_layout import FlatLayout

Kind = Literal["pieces", "parameters"]


class FlatParameters:
    """Some parameters, cut over an axis. They keep their identity: hooks and tied uses stay.

    Args:
        named: of one dtype and device, by name; their values become those of the first rank.
        axis: the ranks that share them out.
        replicas: ranks that hold the same shard, or None: gradients are averaged over both axes.
        keeps_full: the buffer stays in memory, and the shard is a view of it (ZeRO-1 and 2).
        keeps_gradients: the buffer of gradients stays until they are dropped (ZeRO-1).
        compute_dtype: of the parameters while they are unsharded; None for that of the shard.
        values: theirs in a flat buffer, instead of the first rank's; nothing is sent then.

    Attributes:
        names, parameters, pieces: in the same order.
        layout: where each parameter lies in the buffer, and its piece in the shard.
        gradients: of the parameters.
        full: the flat buffer (n,), without memory while `is_unsharded` is false and it is not kept.
        is_unsharded: the parameters hold what the optimizers of all ranks made of them, when they were
            gathered.
        work: the all_gather under way, or None.
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
        values: torch.Tensor | None = None,
    ):
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.axis, self.replicas = axis, replicas
        self.layout = FlatLayout(self.parameters, axis)
        self._make: Callable[..., FlatParameters] = functools.partial(  # one like this
            FlatParameters,
            axis=axis,
            replicas=replicas,
            keeps_full=keeps_full,
            keeps_gradients=keeps_gradients,
            compute_dtype=compute_dtype,
        )
        values = self._first_rank_values() if values is None else values
        # Integers are ids, masks, or quantised: they stay what they are.
        is_cast = values.is_floating_point() and compute_dtype not in (None, values.dtype)
        self.keeps_full = keeps_full and not is_cast
        self.full = values.to(compute_dtype) if is_cast else values
        # `data`: a version of its own, which tells of writes to the shard and not of gathers.
        self.shard = self.own.data if self.keeps_full else values[self.layout.own].clone()
        self.pieces = [
            nn.Parameter(self.shard[self.layout.slice_of(index)], requires_grad=parameter.requires_grad)
            for index, parameter in enumerate(self.parameters)
        ]
        for parameter, view in zip(self.parameters, self.layout.views(self.full), strict=True):
            parameter.data = view
        self.is_unsharded = True
        self.work: Work | None = None
        self._gathered_version = self.version
        kinds: tuple[Kind, ...] = ("pieces", "parameters")
        self._addresses = {kind: [_memory(tensor) for tensor in self._tensors(kind)] for kind in kinds}
        self.gradients = FlatGradients(
            self.names,
            self.parameters,
            self.pieces,
            layout=self.layout,
            axis=axis,
            replicas=replicas,
            keeps_buffer=keeps_gradients,
        )

    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> "FlatParameters":
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
        self.wait_unshard()
        if self.keeps_full:
            values = self.full.clone()
        else:
            values = self.shard.new_empty(self.layout.numel)
            values[self.layout.own] = self.shard
        views = zip(self.parameters, self.layout.views(values), strict=True)
        # Not the view itself: a parameter of its own version, which autograd compares.
        parameters = [memo.setdefault(id(p), nn.Parameter(v.data, p.requires_grad)) for p, v in views]
        named = list(zip(self.names, parameters, strict=True))
        copied = memo[id(self)] = self._make(named, values=values)
        for original, piece in zip(self.pieces, copied.pieces, strict=True):
            memo[id(original)] = piece.requires_grad_(original.requires_grad)
        copied.is_unsharded = self.is_unsharded and not self.is_changed
        if not copied.is_unsharded and not copied.keeps_full:
            copied.full.untyped_storage().resize_(0)  # as `reshard` leaves it
        return copied

    @property
    def elements(self) -> list[slice]:
        """Which elements of each parameter this rank's piece is."""
        return [self.layout.elements_of(index) for index in range(len(self.parameters))]

    @property
    def own(self) -> torch.Tensor:
        """This rank's cut of the full buffer: a view."""
        return self.full[self.layout.own]

    @property
    def version(self) -> int:
        """Counts the writes to the shard and its pieces; not those through `data`."""
        return self.shard._version

    @property
    def is_changed(self) -> bool:
        """True if the shard was written to since the parameters were gathered from it."""
        return self.shard._version != self._gathered_version

    @property
    def is_stale(self) -> bool:
        """True if the parameters are unsharded, or about to be, but not what the shards are by now."""
        return self.is_changed and (self.is_unsharded or self.work is not None)

    @torch.no_grad()
    def keep_memory(self, kind: Kind) -> None:
        """Give pieces or parameters their memory back where somebody replaced it, and take in its values.

        `module.double().float()` and `vector_to_parameters` replace it: else the new one would not be seen.

        Raises:
            RuntimeError: they have another shape, dtype or device now.
        """
        for index, tensor in enumerate(self._tensors(kind)):
            if _memory(tensor) != self._addresses[kind][index]:
                self._take_back(kind, index, tensor)

    def begin_unshard(self) -> bool:
        """Begin an unshard. False if the parameters were gathered already, of these very shards."""
        if self.is_stale:
            self.wait_unshard()
            self.is_unsharded = False
        if self.is_unsharded or self.work:
            return False
        self._gathered_version = self.version
        return True

    def wait_unshard(self) -> None:
        """Wait until the parameters are unsharded, if they are about to be."""
        if self.work:
            self.work.wait()
            self.work, self.is_unsharded = None, True

    @torch.no_grad()
    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Give the pieces their parts of full tensors. ValueError if one has not its parameter's shape."""
        full = self.shard.new_empty(self.layout.numel)
        for name, view, value in zip(self.names, self.layout.views(full), values, strict=True):
            if value.shape != view.shape:
                raise ValueError(f"{name} is {tuple(view.shape)}, and the state has {tuple(value.shape)}")
            view.copy_(value)
        self.keep_memory("pieces")
        self.shard.copy_(full[self.layout.own])
        if not self.is_unsharded:
            self._gathered_version = self.version  # no update that gradients under way were meant for

    def _tensors(self, kind: Kind) -> Sequence[nn.Parameter]:
        return self.pieces if kind == "pieces" else self.parameters

    def _take_back(self, kind: Kind, index: int, tensor: nn.Parameter) -> None:
        is_piece = kind == "pieces"
        own = self.shard[self.layout.slice_of(index)] if is_piece else self.layout.views(self.full)[index]
        now, then = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (tensor, own))
        if now != then:
            raise RuntimeError(
                f"{self.names[index]} is {now} now, and was {then} when it was sharded: convert the module "
                f"before that, or wrap it anew"
            )
        own.copy_(tensor)
        tensor.data = own
        self._addresses[kind][index] = _memory(tensor)

    @torch.no_grad()
    def _first_rank_values(self) -> torch.Tensor:
        values = self.parameters[0].detach().new_empty(self.layout.numel)
        for view, parameter in zip(self.layout.views(values), self.parameters, strict=True):
            view.copy_(parameter)
        replicate([values], [self.axis, self.replicas])
        return values


def _memory(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    """Tells whether it is the same memory as before: the check of every step, so a cheap one."""
    return tensor.data_ptr(), tensor.dtype


def flatten_parameters(
    named: Sequence[tuple[str, nn.Parameter]], axis: Axis, *, limit_bytes: float = float("inf"), **options
) -> list[FlatParameters]:
    """Flat buffers of some parameters: one for each dtype and device, frozen ones apart.

    Args:
        named, axis, options: as for `FlatParameters`.
        limit_bytes: more buffers, none larger than this, but for a parameter that is.
    """
    return [FlatParameters(members, axis, **options) for members in pack(named, limit_bytes)]
