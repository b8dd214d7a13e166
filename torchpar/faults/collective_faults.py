"""Faulty collectives, patched into `Axis` by mesh axis and purpose."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from torchpar.comm.chunks import chunk_slices
from torchpar.comm.collectives import Axis
from torchpar.comm.handles import CompletedWork, Work


@contextmanager
def left_out_reductions(*, axis: str, purpose: str) -> Generator[None]:
    """Sums over an axis are not made: each rank goes on with its own part of them."""
    all_reduce, reduce_scatter = Axis.start_all_reduce, Axis.start_reduce_scatter
    wrong = (axis, purpose)

    def no_all_reduce(self: Axis, tensor: torch.Tensor, *, purpose: str = "", **options: Any) -> Work:
        if (self.name, purpose) == wrong:
            return CompletedWork(lambda: None)
        return all_reduce(self, tensor, purpose=purpose, **options)

    def no_reduce_scatter(self: Axis, piece: torch.Tensor, full: torch.Tensor, *, purpose: str = "") -> Work:
        if (self.name, purpose) == wrong:
            own = chunk_slices(len(full), self.size)[self.rank]
            return CompletedWork(lambda: piece.copy_(full[own]))
        return reduce_scatter(self, piece, full, purpose=purpose)

    with patch.multiple(Axis, start_all_reduce=no_all_reduce, start_reduce_scatter=no_reduce_scatter):
        yield


@contextmanager
def contributions_times_ranks(*, axis: str, purpose: str) -> Generator[None]:
    """All-reduces over an axis are of as many times what each rank has: a mean made of them is the sum."""
    right, wrong = Axis.start_all_reduce, (axis, purpose)

    def too_much(self: Axis, tensor: torch.Tensor, *, purpose: str = "", **options: Any) -> Work:
        if (self.name, purpose) == wrong:
            tensor.mul_(self.size)
        return right(self, tensor, purpose=purpose, **options)

    with patch.object(Axis, "start_all_reduce", too_much):
        yield


@contextmanager
def sent_zeros(*, axis: str, purpose: str) -> Generator[None]:
    """Messages along an axis arrive as zeros: each rank goes on with its own part of a sum."""
    right, wrong = Axis.start_send, (axis, purpose)

    def nothing(self: Axis, tensor: torch.Tensor, *, purpose: str = "", **options: Any) -> Work:
        sent = torch.zeros_like(tensor) if (self.name, purpose) == wrong else tensor
        return right(self, sent, purpose=purpose, **options)

    with patch.object(Axis, "start_send", nothing):
        yield
