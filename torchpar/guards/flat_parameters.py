"""Flat parameters that notice what is done to them: replaced memory, updates, deep copies, another dtype."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from torchpar.comm.collectives import Axis
from torchpar.guards.flat_gradients import FlatGradients
from torchpar.manual.packs import pack
from torchpar.manual.zero import flat_parameters as lesson

Kind = Literal["pieces", "parameters"]


class FlatParameters(lesson.FlatParameters):
    """Some parameters, cut over an axis: see the lesson's.

    Args:
        named, axis, options: as the lesson's.
        compute_dtype: of the parameters while they are unsharded; None for that of the shard.
        values: of a flat buffer, (n,), in place of the first rank's; saves the broadcast.
    """

    gradients: FlatGradients
    gradients_of = FlatGradients

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        axis: Axis,
        *,
        compute_dtype: torch.dtype | None = None,
        values: torch.Tensor | None = None,
        **options: Any,
    ):
        self._compute_dtype, self._given = compute_dtype, values
        self._make: Callable[..., FlatParameters] = functools.partial(  # one like this
            FlatParameters, axis=axis, compute_dtype=compute_dtype, **options
        )
        super().__init__(named, axis, **options)
        self._given = None
        self._gathered_version = self.version
        kinds: tuple[Kind, ...] = ("pieces", "parameters")
        self._addresses = {kind: [_memory(tensor) for tensor in self._tensors(kind)] for kind in kinds}

    def starting_values(self) -> torch.Tensor:
        """Values of the flat buffer, (n,): the given ones, or the first rank's."""
        return super().starting_values() if self._given is None else self._given

    def cut(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat buffer (n,) in the dtype to compute in, and this rank's shard in the parameters' own."""
        # Integers are ids, masks, or quantised: they stay what they are.
        is_cast = values.is_floating_point() and self._compute_dtype not in (None, values.dtype)
        self.keeps_full = self.keeps_full and not is_cast
        full, shard = super().cut(values)
        # `data`: a version of its own, which tells of writes to the shard and not of gathers.
        return full.to(self._compute_dtype) if is_cast else full, shard.data

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
    def version(self) -> int:
        """Counts the writes to the shard and its pieces; not those through `data`."""
        return self.shard._version

    @property
    def is_changed(self) -> bool:
        """True if the shard was written to since the parameters were gathered from it."""
        return self.shard._version != self._gathered_version

    @property
    def is_stale(self) -> bool:
        """True if the unsharded parameters, there or on their way, are older than the shards."""
        return self.is_changed and (self.is_unsharded or self.work is not None)

    @torch.no_grad()
    def keep_memory(self, kind: Kind) -> None:
        """Give pieces or parameters their memory back after it was replaced, with the new values.

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
        begins = super().begin_unshard()
        if begins:
            self._gathered_version = self.version
        return begins

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


def _memory(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    """Tells whether it is the same memory as before: the check of every step, so a cheap one."""
    return tensor.data_ptr(), tensor.dtype


def flatten_parameters(
    named: Sequence[tuple[str, nn.Parameter]],
    axis: Axis,
    *,
    limit_bytes: float = float("inf"),
    **options: Any,
) -> list[FlatParameters]:
    """Guarded flat buffers: arguments as for the lesson's function, and `FlatParameters`."""
    return [FlatParameters(members, axis, **options) for members in pack(named, limit_bytes)]
