"""`DataParallel` for any module, guarded: `manual.data_parallel` is the lesson.

What the guards are for: parameters that are frozen, converted or replaced after the wrapping, used on some
ranks only, or stepped over before their gradients are averaged; buffers; deep copies; torch.compile.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compare.contract.communication import REPLICATE
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.comm.untraced import untraced
from torchpar.guards.agreement import agree_on_use
from torchpar.guards.buffers import Buffers
from torchpar.guards.replicated import ReplicatedParameters
from torchpar.guards.weak_hooks import weakly
from torchpar.manual import data_parallel as lesson
from torchpar.manual.buckets import Bucket, GradientBuckets
from torchpar.manual.data_parallel import GradientSync


class DataParallel(lesson.DataParallel):
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
        gradient_sync: naive, flat, overlapped or bucketed, as the lesson's text says.
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
        if gradient_sync not in ("naive", "flat", "overlapped", "bucketed"):
            raise ValueError(f"gradient_sync = {gradient_sync!r}: use naive, flat, overlapped or bucketed")
        if bucket_size_mb <= 0:
            raise ValueError(f"bucket_size_mb = {bucket_size_mb} must be positive")
        axis = Axis.of(group)
        replicated = ReplicatedParameters(module, axis)
        super().__init__(module, gradient_sync=gradient_sync, bucket_size_mb=bucket_size_mb, group=axis)
        self._find_unused, self._replicated = find_unused_parameters, replicated
        self._shared_buffers = Buffers(module, [axis], each_pass=broadcast_buffers)
        self._shared_buffers.broadcast(purpose=REPLICATE)
        self._replicated.claim()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: between two steps, and without hooks, which are about this module's parameters."""
        return {**super().__getstate__(), "is_synchronizing": True, "hooks": [], "buckets": GradientBuckets()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the copy."""
        super().__setstate__(state)
        self._replicated.claim()
        self.make_buckets()

    def forward(self, *args, **kwargs):
        """The module's own."""
        self._begin_pass()
        return super().forward(*args, **kwargs)

    @untraced
    def _begin_pass(self) -> None:
        self._shared_buffers.before_forward(synchronizing=self.is_synchronizing)
        if self._replicated.are_changed:
            self._replicated.refresh()
            for hook in self.hooks:
                hook.remove()
            self.make_buckets()

    def hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        """The lesson's hook, on a gradient of the parameter's shape, behind weak references."""
        return weakly(self.gradient_ready, bucket, index)

    @torch.no_grad()
    def gradient_ready(self, bucket: Bucket, index: int) -> None:
        """Take in a gradient that is there, and remember that it is this rank's own."""
        parameter = bucket.parameters[index]
        if parameter.grad is None and not parameter.requires_grad:
            return  # frozen between forward and backward: then it has none, as on one device
        self._replicated.own_gradients[parameter] = bucket.names[index]
        if self.is_synchronizing:
            require_reducible(bucket, index)
        super().gradient_ready(bucket, index)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Launch the buckets that backward left, and wait until every gradient is the mean over the ranks."""
        parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        used = [parameter.grad is not None for parameter in parameters]
        self._fill_in_unused()
        super().finish_gradient_synchronization()
        # Behind all buckets, the one place in the order of collectives that every rank shares.
        if self._find_unused and parameters:
            used_anywhere = agree_on_use(used, [self.axis], device=parameters[0].device)
            for parameter, is_used in zip(parameters, used_anywhere, strict=True):
                if not is_used:
                    parameter.grad = None
        self._replicated.own_gradients.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero, also of a step that is given up halfway, on all ranks."""
        self.buckets.reset()
        self._replicated.own_gradients.clear()
        super().zero_grad(set_to_none)

    def _fill_in_unused(self) -> None:
        """Zeros for gradients that other ranks may have; and no gradient that cannot be reduced."""
        for bucket in self.buckets:
            for index in bucket.pending:
                parameter = bucket.parameters[index]
                if parameter.grad is None and not self._find_unused:
                    raise RuntimeError(
                        f"parameter {bucket.names[index]} has no gradient on rank {self.axis.rank}: it took "
                        f"no part in the loss. Set find_unused_parameters=True if that is meant"
                    )
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                require_reducible(bucket, index)


def require_reducible(bucket: Bucket, index: int) -> None:
    """RuntimeError if a gradient is in its bucket already, or sparse, or a hook has taken it away."""
    name, gradient = bucket.names[index], bucket.parameters[index].grad
    if index not in bucket.pending:
        raise RuntimeError(
            f"the gradient of {name} was ready twice: call finish_gradient_synchronization() after each "
            f"backward, or put all but the last in no_sync()"
        )
    if gradient is None:
        raise RuntimeError(f"a hook on {name} takes its gradient away: remove the hook")
    if gradient.is_sparse:
        raise RuntimeError(f"{name} has a sparse gradient: use a dense embedding")
