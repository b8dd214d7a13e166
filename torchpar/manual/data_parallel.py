"""Data parallelism by hand: every rank holds the whole module, and gradients are averaged over ranks.

One idea makes all four synchronisations: a list of buckets, and when they are launched.

    naive        one parameter a bucket      after backward
    flat         one bucket                  after backward
    overlapped   one parameter a bucket      as soon as its gradient is there, during backward
    bucketed     up to bucket_size_mb each   as soon as all its gradients are there, during backward

Buckets hold the parameters in reverse, the order in which backward reaches them, and are launched in the
same order on every rank, so that ranks whose graphs differ cannot mix up their collectives.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from compare.contract.communication import REPLICATE, UNUSED
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.manual.any_module.buffers import Buffers
from torchpar.manual.any_module.claims import claim, require_unclaimed
from torchpar.manual.any_module.untraced import untraced
from torchpar.manual.buckets import Bucket, make_buckets

GradientSync = Literal["naive", "flat", "overlapped", "bucketed"]


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

    kind = "DataParallel"

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
        self._own_gradients: dict[torch.Tensor, str] = {}  # not averaged yet
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        require_unclaimed(dict(module.named_parameters()))
        self._shared_buffers = Buffers(module, [self._axis], each_pass=broadcast_buffers)
        self._shared_buffers.broadcast(purpose=REPLICATE)
        self._broadcast(module.parameters())
        self._make_buckets()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: between two steps, and without hooks, which are about this module's parameters."""
        between = {"_synchronizing": True, "_own_gradients": {}, "_hooks": [], "_buckets": []}
        return {**super().__getstate__(), **between}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the copy."""
        super().__setstate__(state)
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
        used = [p.grad is not None for bucket in self._buckets for p in bucket.parameters]
        for bucket in self._buckets[self._launched :]:
            for place in bucket.pending:
                self._require_gradient(bucket, place)
                bucket.add(place)
            bucket.launch(self._axis)
        # Behind all buckets, the one place in the order of collectives that every rank shares.
        used_anywhere = self._agree_on_use(used) if self._find_unused else used
        for bucket in self._buckets:
            bucket.finish(self._axis)
        for parameter, is_used in zip(self._bucketed_parameters(), used_anywhere, strict=True):
            if not is_used:
                parameter.grad = None
        self._launched = 0
        self._own_gradients.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero, also of a step that is given up halfway, on all ranks."""
        for bucket in self._buckets:
            bucket.reset()
        self._launched = 0
        self._own_gradients.clear()
        super().zero_grad(set_to_none)

    @untraced
    def _begin_pass(self) -> None:
        self._shared_buffers.before_forward(synchronizing=self._synchronizing)
        if self._trainable() != self._bucketed:  # frozen, unfrozen, converted or replaced since
            self._broadcast([p for p in self.module.parameters() if p not in self._replicated])
            self._make_buckets()

    def before_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """RuntimeError if the gradient of one of them is still this rank's own."""
        for parameter in parameters:
            if parameter in self._own_gradients and parameter.grad is not None:
                raise RuntimeError(
                    f"call finish_gradient_synchronization() before step(): the gradient of "
                    f"{self._own_gradients[parameter]} is still this rank's own"
                )

    def after_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """The same, if a closure made them."""
        self.before_step(optimizer, parameters)

    def _trainable(self) -> list[tuple]:
        return [(id(p), p.dtype, p.device, p.shape) for p in self.module.parameters() if p.requires_grad]

    def _bucketed_parameters(self) -> list[nn.Parameter]:
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    @torch.no_grad()
    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()  # itself, or a copy of a strided one
            self._axis.broadcast(whole, purpose=REPLICATE)
            if whole is not tensor:
                tensor.copy_(whole)

    def _make_buckets(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._bucketed = self._trainable()
        self._replicated = set(self.module.parameters())
        claim(self, dict(self.module.named_parameters()))
        self._buckets = make_buckets(self.module, self._limit_bytes)
        self._launched = 0
        for bucket in self._buckets:
            for place, parameter in enumerate(bucket.parameters):
                hook = self._make_hook(bucket, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _make_hook(self, bucket: Bucket, place: int):
        @untraced
        def hook(parameter: torch.Tensor) -> None:
            self._gradient_ready(bucket, place)

        return hook

    @torch.no_grad()
    def _gradient_ready(self, bucket: Bucket, place: int) -> None:
        if bucket.parameters[place].grad is None and not bucket.parameters[place].requires_grad:
            return  # frozen between forward and backward: then it has none, as on one device
        self._own_gradients[bucket.parameters[place]] = bucket.names[place]
        if not self._synchronizing:
            return
        if not bucket.awaits(place):
            raise RuntimeError(
                f"the gradient of {bucket.names[place]} was ready twice: call "
                f"finish_gradient_synchronization() after each backward, or put all but the last in no_sync()"
            )
        bucket.add(place)
        if self._during_backward:
            while self._launched < len(self._buckets) and self._buckets[self._launched].is_ready:
                self._buckets[self._launched].launch(self._axis)
                self._launched += 1

    def _require_gradient(self, bucket: Bucket, place: int) -> None:
        parameter = bucket.parameters[place]
        if parameter.grad is not None:
            return  # accumulated under no_sync, and not used in the last pass
        if not self._find_unused:
            raise RuntimeError(
                f"parameter {bucket.names[place]} has no gradient on rank {self._axis.rank}: it took no part "
                f"in the loss. Set find_unused_parameters=True if that is meant"
            )
        parameter.grad = torch.zeros_like(parameter)

    def _agree_on_use(self, used: list[bool]) -> list[bool]:
        if not used:
            return used
        device = self._buckets[0].parameters[0].device
        ranks_using = torch.tensor(used, dtype=torch.int32, device=device)
        self._axis.all_reduce(ranks_using, purpose=UNUSED)
        return (ranks_using > 0).tolist()
