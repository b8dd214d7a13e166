"""Data parallelism by hand: every rank has the whole module, and gradients are averaged over the ranks.

Every rank has its own rows of each batch. Gradients are reduced in buckets. The four modes differ in two
choices: which parameters share a bucket, and when its all-reduce starts.

    naive        one parameter a bucket      after backward
    flat         one bucket for each axis    after backward
    overlapped   one parameter a bucket      during backward, when its gradient is ready
    bucketed     up to bucket_size_mb each   during backward, when all its gradients are ready

Buckets are filled in reverse order of the parameters, which is about the order of backward.
All ranks start the all-reduces in the same order, so a full bucket waits for the buckets before it.

Source: PyTorch DDP (arXiv 2006.15704).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from compare.contract.communication import GRADIENTS, REPLICATE
from torchpar.comm.collectives import Axis, Work

T = TypeVar("T", bound=Any)
AxisOf = Mapping[nn.Parameter, Axis]
"""By parameter, the ranks that have it: all ranks of the data, and for an expert fewer."""


def pack(parameters: Iterable[nn.Parameter], limit_bytes: float, axis_of: AxisOf) -> list[list[nn.Parameter]]:
    """Group parameters in their order. A group has one axis, and at most `limit_bytes` or one parameter."""
    packs: list[list[nn.Parameter]] = []
    unfinished: dict[Axis, list[nn.Parameter]] = {}
    for parameter in parameters:
        axis = axis_of[parameter]
        members = unfinished.get(axis)
        if members is None or sum(p.nbytes for p in members) + parameter.nbytes > limit_bytes:
            members = unfinished[axis] = []
            packs.append(members)
        members.append(parameter)
    return packs


class Flat:
    """The layout of parameters end to end in a flat buffer (n,): parameter i begins at `starts[i]`."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        self.starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))

    def view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """The view of a flat buffer (n,) that has the place and shape of the parameter at `index`."""
        return buffer[self.starts[index] : self.starts[index + 1]].view(self.parameters[index].shape)


class Bucket(Flat):
    """Parameters whose gradients are averaged in one all-reduce.

    Attributes:
        buffer: the gradients end to end (n,). The parameters' gradients are views of it. None at first.
        pending: indices of the parameters whose gradient of this step is missing.
        work: the all-reduce of `buffer` under way, or None.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        super().__init__(parameters)
        self.reset()

    def reset(self) -> None:
        """Prepare for the next step. The gradients keep the buffer alive while they are in use."""
        self.pending = set(range(len(self.parameters)))
        self.buffer: torch.Tensor | None = None
        self.work: Work | None = None

    @property
    def is_full(self) -> bool:
        """True if all gradients of the step are in the bucket."""
        return not self.pending

    def add(self, index: int, *, ranks: int) -> None:
        """Copy a parameter's gradient, divided by `ranks`, into the buffer: the sum is then the mean.

        The gradient becomes a view of the buffer, so the mean is not copied back. Division comes before the
        sum because gloo has no ReduceOp.AVG.
        """
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None
        self.pending.remove(index)
        if len(self.parameters) == 1 and gradient.is_contiguous():  # it is its own buffer
            self.buffer = gradient.view(-1).div_(ranks)
            return
        if self.buffer is None:
            self.buffer = gradient.new_empty(self.starts[-1])
        parameter.grad = torch.div(gradient, ranks, out=self.view(self.buffer, index))


class BucketQueue(list[T]):
    """Buckets in the order in which all ranks reduce them."""

    next = 0

    def pop_ready(self) -> Iterator[T]:
        """Yield the full buckets up to the first that is not full."""
        while self.next < len(self) and self[self.next].is_full:
            self.next += 1
            yield self[self.next - 1]


class DataParallel(nn.Module):
    """Averages the gradients of a module over ranks.

    Call it as the module. After the last `backward` of a step call `finish_gradient_synchronization`. Every
    parameter takes part in the loss. Backwards before the last run with `is_synchronizing` False.

    Args:
        gradient_sync: naive, flat, overlapped or bucketed.
        bucket_size_mb: the size of a bucket, in MB of 1e6 bytes, if bucketed.
        ranks: the number of ranks over which a gradient is averaged.
    """

    is_synchronizing = True

    def __init__(
        self, module: nn.Module, *, gradient_sync: str, bucket_size_mb: float, axis_of: AxisOf, ranks: int
    ):
        super().__init__()
        self.module, self.axis_of, self.ranks = module, axis_of, ranks
        for parameter in module.parameters():
            # Replicas begin equal: broadcast the first rank's values.
            axis_of[parameter].broadcast(parameter.detach(), purpose=REPLICATE)
        limits = {"naive": 0.0, "flat": float("inf"), "overlapped": 0.0, "bucketed": bucket_size_mb * 1e6}
        self._during_backward = gradient_sync in ("overlapped", "bucketed")
        packs = pack([*module.parameters()][::-1], limits[gradient_sync], axis_of)
        self.buckets = BucketQueue(Bucket(parameters) for parameters in packs)
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self.gradient_ready, bucket, index))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def gradient_ready(self, bucket: Bucket, index: int, parameter: torch.Tensor) -> None:
        """Add a gradient to its bucket. Backward calls this as soon as it has accumulated the gradient."""
        if self.is_synchronizing:
            bucket.add(index, ranks=self.ranks)
            if self._during_backward:
                self.all_reduce_full_buckets()

    def all_reduce_full_buckets(self) -> None:
        """Start the all-reduces of the full buckets."""
        for bucket in self.buckets.pop_ready():
            assert bucket.buffer is not None
            # Sum the bucket over the ranks, while backward computes the gradients of earlier layers.
            axis = self.axis_of[bucket.parameters[0]]
            bucket.work = axis.start_all_reduce(bucket.buffer, purpose=GRADIENTS)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Reduce the remaining buckets, and wait until every gradient is the mean over the ranks."""
        for bucket in self.buckets:
            for index in sorted(bucket.pending):  # under a zero-bubble pipeline no backward synchronizes
                bucket.add(index, ranks=self.ranks)
        self.all_reduce_full_buckets()
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.reset()
        self.buckets.next = 0
