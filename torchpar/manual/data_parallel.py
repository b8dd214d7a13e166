"""Data parallelism by hand: every rank holds the whole module, and gradients are averaged over ranks.

One idea makes all four synchronisations: a list of buckets, and when they are launched.

    naive        one parameter a bucket      after backward
    flat         one bucket                  after backward
    overlapped   one parameter a bucket      as soon as its gradient is there, during backward
    bucketed     up to bucket_size_mb each   as soon as all its gradients are there, during backward

Buckets hold the parameters in reverse, the order in which backward reaches them, and are launched in the
same order on every rank, so that ranks whose graphs differ cannot mix up their collectives.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from compare.contract.communication import GRADIENTS, REPLICATE
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.manual.any_module.agreement import agree_on_use
from torchpar.manual.any_module.buffers import Buffers
from torchpar.manual.any_module.replicated import ReplicatedParameters
from torchpar.manual.any_module.untraced import untraced
from torchpar.manual.any_module.weak_hooks import weakly
from torchpar.manual.buckets import Bucket, Buckets, make_buckets

GradientSync = Literal["naive", "flat", "overlapped", "bucketed"]


def gradient_ready(buckets: Buckets, bucket: Bucket, index: int, axis: Axis) -> None:
    """The hook during backward: a parameter's gradient goes into its bucket, and full buckets leave."""
    bucket.add(index, ranks=axis.size)
    all_reduce_full_buckets(buckets, axis)


def all_reduce_full_buckets(buckets: Buckets, axis: Axis) -> None:
    """Begin to sum the buckets that are full over the ranks, each behind those before it."""
    for bucket in buckets.take_full():
        bucket.work = axis.start_all_reduce(bucket.buffer, purpose=GRADIENTS)


def synchronize_gradients(buckets: Buckets, axis: Axis) -> None:
    """Make every gradient the mean over the ranks. All buckets are full by now; some are on their way."""
    all_reduce_full_buckets(buckets, axis)
    for bucket in buckets:
        bucket.wait()
    buckets.reset()


class DataParallel(nn.Module):
    """Averages the gradients of any module over the ranks of a group.

    Call it as the module itself; after `backward` call `finish_gradient_synchronization()`, then step the
    optimizer. Parameters and buffers are those of the first rank from the start.

        >>> model = DataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        >>> for first, second in torch.randn(3, 2, 16, 8):   # this rank's share of each step's batch
        ...     with model.no_sync():
        ...         model(first).square().mean().div(2).backward()
        ...     model(second).square().mean().div(2).backward()
        ...     model.finish_gradient_synchronization()      # the mean over all ranks
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Args:
        module: tied and frozen parameters, buffers and mixed dtypes are fine.
        gradient_sync: naive, flat, overlapped or bucketed, as the module's text says.
        bucket_size_mb: for bucketed; 1 MB = 1e6 bytes. A larger parameter gets a bucket of its own.
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
        find_unused_parameters: let parameters be without a gradient. One used on no rank keeps None on
            all; one used on some counts as zero on the others. Costs one small all-reduce a step.
        broadcast_buffers: buffers, such as BatchNorm's statistics, become the first rank's before each
            forward but those that follow one without gradients, or one under no_sync. A rank that is to
            evaluate alone calls `module`.

    Raises:
        RuntimeError: from `backward`, if it runs twice before the gradients are synchronised; from
            `finish_gradient_synchronization`, if a parameter has no gradient. Go on after `zero_grad()`
            of this module.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        gradient_sync: GradientSync = "bucketed",
        bucket_size_mb: float = 25.0,
        group: Axis | ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
    ):
        super().__init__()
        if gradient_sync not in ("naive", "flat", "overlapped", "bucketed"):
            raise ValueError(f"gradient_sync = {gradient_sync!r}: use naive, flat, overlapped or bucketed")
        if bucket_size_mb <= 0:
            raise ValueError(f"bucket_size_mb = {bucket_size_mb} must be positive")
        self.module = module
        self._axis = Axis.of(group)
        self._limit_bytes = {"bucketed": bucket_size_mb * 1e6, "flat": float("inf")}.get(gradient_sync, 0.0)
        self._during_backward = gradient_sync in ("overlapped", "bucketed")
        self._find_unused = find_unused_parameters
        self._synchronizing = True
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._replicated = ReplicatedParameters(module, self._axis)
        self._shared_buffers = Buffers(module, [self._axis], each_pass=broadcast_buffers)
        self._shared_buffers.broadcast(purpose=REPLICATE)
        self._replicated.refresh()
        self._make_buckets()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: between two steps, and without hooks, which are about this module's parameters."""
        return {**super().__getstate__(), "_synchronizing": True, "_hooks": [], "_buckets": Buckets()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the copy."""
        super().__setstate__(state)
        self._replicated.claim()
        self._make_buckets()

    def forward(self, *args, **kwargs):
        """The module's own."""
        self._begin_pass()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Only accumulate: put it around forward and backward of every pass of a step but the last."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks; launch what was not launched in backward."""
        parameters = self._buckets.parameters
        used = [parameter.grad is not None for parameter in parameters]
        self._fill_buckets()
        synchronize_gradients(self._buckets, self._axis)
        # Behind all buckets, the one place in the order of collectives that every rank shares.
        if self._find_unused and parameters:
            used_anywhere = agree_on_use(used, [self._axis], device=parameters[0].device)
            for parameter, is_used in zip(parameters, used_anywhere, strict=True):
                if not is_used:
                    parameter.grad = None
        self._replicated.own_gradients.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero, also of a step that is given up halfway, on all ranks."""
        self._buckets.reset()
        self._replicated.own_gradients.clear()
        super().zero_grad(set_to_none)

    @untraced
    def _begin_pass(self) -> None:
        self._shared_buffers.before_forward(synchronizing=self._synchronizing)
        if self._replicated.are_changed:
            self._replicated.refresh()
            self._make_buckets()

    def _make_buckets(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._buckets = make_buckets(self.module, self._limit_bytes)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(weakly(self._take_gradient, bucket, index))
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters)
        ]

    @torch.no_grad()
    def _take_gradient(self, bucket: Bucket, index: int) -> None:
        parameter = bucket.parameters[index]
        if parameter.grad is None and not parameter.requires_grad:
            return  # frozen between forward and backward: then it has none, as on one device
        self._replicated.own_gradients[parameter] = bucket.names[index]
        if not self._synchronizing:
            return
        if self._during_backward:
            gradient_ready(self._buckets, bucket, index, self._axis)
        else:
            bucket.add(index, ranks=self._axis.size)

    def _fill_buckets(self) -> None:
        """Add the gradients that came under no_sync only, and zeros for those that other ranks may have."""
        for bucket in self._buckets:
            for index in bucket.pending:
                parameter = bucket.parameters[index]
                if parameter.grad is None and not self._find_unused:
                    raise RuntimeError(
                        f"parameter {bucket.names[index]} has no gradient on rank {self._axis.rank}: it took "
                        f"no part in the loss. Set find_unused_parameters=True if that is meant"
                    )
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                bucket.add(index, ranks=self._axis.size)
