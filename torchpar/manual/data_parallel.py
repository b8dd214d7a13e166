"""Data parallelism by hand: every rank holds the whole module, and gradients are averaged over ranks.

One idea makes all four synchronisations: a list of buckets, and when they are launched.

    naive        one parameter a bucket      after backward
    flat         one bucket                  after backward
    overlapped   one parameter a bucket      as soon as its gradient is there, during backward
    bucketed     up to bucket_size_mb each   as soon as all its gradients are there, during backward

Buckets hold the parameters in reverse, the order in which backward reaches them, and are launched in the
same order on every rank, so that ranks whose graphs differ cannot mix up their collectives.

The engine runs this class; `torchpar.DataParallel` is the same with guards, for any module.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from compare.contract.communication import GRADIENTS
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.manual.accumulation import Accumulates
from torchpar.manual.buckets import Bucket, GradientBuckets, make_buckets
from torchpar.manual.replicate import replicate

GradientSync = Literal["naive", "flat", "overlapped", "bucketed"]


def all_reduce_full_buckets(buckets: GradientBuckets, axis: Axis) -> None:
    """Begin to sum the buckets that are full over the ranks, each behind those before it."""
    for bucket in buckets.take_full():
        bucket.work = axis.start_all_reduce(bucket.buffer, purpose=GRADIENTS)


def synchronize_gradients(buckets: GradientBuckets, axis: Axis) -> None:
    """Make every gradient the mean over the ranks. All buckets are full by now; some are on their way."""
    all_reduce_full_buckets(buckets, axis)
    for bucket in buckets:
        bucket.wait()
    buckets.reset()


class DataParallel(Accumulates, nn.Module):
    """Averages the gradients of a module over the ranks of a group.

    Call it as the module itself; after `backward` call `finish_gradient_synchronization()`, then step the
    optimizer. Parameters are those of the first rank from the start. Every trainable one takes part in the
    loss, and backward runs once between two synchronisations, but in `no_sync`.

    Args:
        module: its parameters may be tied or frozen.
        gradient_sync: naive, flat, overlapped or bucketed, as the file's text says.
        bucket_size_mb: for bucketed; 1 MB = 1e6 bytes. A larger parameter gets a bucket of its own.
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        gradient_sync: GradientSync = "bucketed",
        bucket_size_mb: float = 25.0,
        group: Axis | ProcessGroup | None = None,
    ):
        super().__init__()
        self.module, self.axis = module, Axis.of(group)
        self._limit_bytes = {"bucketed": bucket_size_mb * 1e6, "flat": float("inf")}.get(gradient_sync, 0.0)
        self._during_backward = gradient_sync in ("overlapped", "bucketed")
        replicate(module.parameters(), [self.axis])
        self.make_buckets()

    def make_buckets(self) -> None:
        """Share the trainable parameters out over buckets, and ask to be told of each gradient."""
        self.buckets = make_buckets(self.module, self._limit_bytes)
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self.hook(bucket, index))
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
        ]

    def hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        """A hook for backward: the gradient of a bucket's parameter, shaped as it, is there."""
        return lambda parameter: self.gradient_ready(bucket, index)

    def forward(self, *args, **kwargs):
        """The module's own."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def gradient_ready(self, bucket: Bucket, index: int) -> None:
        """During backward a parameter's gradient goes into its bucket, and full buckets leave."""
        if self.is_synchronizing:
            bucket.add(index, ranks=self.axis.size)
            if self._during_backward:
                all_reduce_full_buckets(self.buckets, self.axis)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Launch the buckets that backward left, and wait until every gradient is the mean over the ranks."""
        for bucket in self.buckets:
            for index in bucket.pending:  # gradients that came in no_sync alone
                bucket.add(index, ranks=self.axis.size)
        synchronize_gradients(self.buckets, self.axis)
