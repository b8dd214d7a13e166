"""Data parallelism by hand: every rank holds the whole module, and gradients are averaged over ranks.

One idea makes all four synchronisations: a list of buckets, and when they are launched.

    naive        one parameter a bucket      after backward
    flat         one bucket                  after backward
    overlapped   one parameter a bucket      as soon as its gradient is there, during backward
    bucketed     up to bucket_size_mb each   as soon as all its gradients are there, during backward

A step: backward leaves a gradient, and its hook copies it into a bucket (`DataParallel.gradient_ready`). Full
buckets leave (`LaunchOrder.take_full`): in reverse order of the parameters, as backward comes to them, and in
the same order on every rank, so that ranks whose graphs differ do not mix up their collectives. In the end
`finish_gradient_synchronization` launches the rest and waits.

Sources: PyTorch DDP (arXiv 2006.15704).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from compare.contract.communication import GRADIENTS
from torchpar.comm.collectives import Axis, Work
from torchpar.manual.flat import Accumulates, Flat, NamedParameters, pack, ranks_of, replicate

T = TypeVar("T", bound=Any)


class Bucket(Flat):
    """Parameters whose gradients are averaged together.

    Attributes:
        buffer: the gradients end to end (n,), of which those on the parameters are views; None before any.
        pending: indices of the parameters whose gradient of this step is not in yet.
        work: the collective under way on `buffer`, or None.
    """

    def __init__(self, named: NamedParameters):
        super().__init__(named)
        self.reset()

    def reset(self) -> None:
        """Forget the step; the gradients keep the buffer alive while they are in use."""
        self.pending = set(range(len(self.parameters)))
        self.buffer: torch.Tensor | None = None
        self.work: Work | None = None

    @property
    def is_full(self) -> bool:
        return not self.pending

    def add(self, index: int, *, ranks: int) -> None:
        """Take in the gradient of the parameter at `index`, divided by `ranks`: the sum is then the mean.

        It moves into the buffer and becomes a view of it: one copy, none back, and no second gradient in
        memory. That of a single parameter is its own buffer, if it can be.
        """
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None, f"{self.names[index]} has no gradient"
        self.pending.remove(index)
        if len(self.parameters) == 1 and gradient.is_contiguous():
            self.buffer = gradient.view(-1).div_(ranks)
            return
        if self.buffer is None:
            self.buffer = gradient.new_empty(self.starts[-1])
        parameter.grad = torch.div(gradient, ranks, out=self.view(self.buffer, index))


class LaunchOrder(list[T]):
    """Groups of gradients in the one order in which all ranks reduce them, each when it `is_full`."""

    taken = 0

    def take_full(self) -> Iterator[T]:
        """The full groups whose turn it is: each waits for those before it."""
        while self.taken < len(self) and self[self.taken].is_full:
            self.taken += 1
            yield self[self.taken - 1]


class DataParallel(Accumulates, nn.Module):
    """Averages the gradients of a module over the ranks of a group.

    Call it as the module itself; after `backward` call `finish_gradient_synchronization()`, then step the
    optimizer. Parameters are those of the first rank from the start. Every trainable one takes part in the
    loss, and backward runs once between two synchronisations, but in `no_sync`.

    A bucket has up to `bucket_size_mb` (1 MB = 1e6 bytes), or one larger parameter.
    """

    def __init__(self, module: nn.Module, *, gradient_sync: str, bucket_size_mb: float, axis: Axis):
        super().__init__()
        self.module, self.axis = module, axis
        for parameter in module.parameters():
            replicate([parameter], [ranks_of(parameter, self.axis)])
        limits = {"naive": 0.0, "flat": float("inf"), "overlapped": 0.0, "bucketed": bucket_size_mb * 1e6}
        self._during_backward = gradient_sync in ("overlapped", "bucketed")
        named = list(module.named_parameters())
        self.buckets = LaunchOrder(Bucket(some) for some in pack(named[::-1], limits[gradient_sync]))
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self.gradient_ready, bucket, index))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def gradient_ready(self, bucket: Bucket, index: int, parameter: torch.Tensor) -> None:
        """Backward has left a parameter's gradient: it goes into its bucket, and full buckets leave."""
        if self.is_synchronizing:
            bucket.add(index, ranks=self.axis.size)
            if self._during_backward:
                self.all_reduce_full_buckets()

    def all_reduce_full_buckets(self) -> None:
        for bucket in self.buckets.take_full():
            assert bucket.buffer is not None
            axis = ranks_of(bucket.parameters[0], self.axis)
            bucket.work = axis.start_all_reduce(bucket.buffer, purpose=GRADIENTS)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Launch the buckets that backward left, and wait until every gradient is the mean over the ranks."""
        for bucket in self.buckets:
            for index in sorted(bucket.pending):  # of a pipeline whose backwards are all in no_sync
                bucket.add(index, ranks=self.axis.size)
        self.all_reduce_full_buckets()
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.reset()
        self.buckets.taken = 0
