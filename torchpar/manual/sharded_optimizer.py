"""ZeRO-1 by hand: each rank keeps the optimizer's state for its cut of the parameters, and updates that.

The module stays whole on every rank. A step is three lines:

    reduce_scatter     each rank gets the mean gradient of its shard, in buckets, during backward
    optimizer.step     on this rank's shard, whose state it keeps
    all_gather         every rank gets the updated parameters of all

The engine runs this class; `torchpar.ShardedOptimizer` is the same with guards, for any module.
Source: ZeRO (arXiv 1910.02054), stage 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.manual.accumulation import Accumulates
from torchpar.manual.fully_sharded import finish_mean, reduce_scatter_gradients, unshard
from torchpar.manual.launch_order import LaunchOrder
from torchpar.manual.zero.flat_gradients import FlatGradients
from torchpar.manual.zero.flat_parameters import FlatParameters, flatten_parameters
from torchpar.pieces import HoldsPieces


class ShardedOptimizer(Accumulates, HoldsPieces, torch.optim.Optimizer):
    """An optimizer that treats elements one by one (SGD, Adam, ...), its state shared out over a group.

    It is a torch Optimizer over the whole parameters, and reduces their gradients. After the last backward of
    a step call `finish_gradient_synchronization()`, then `step()`; every parameter takes part in the loss.

    Args:
        params: groups of parameters. Their values become those of the first rank, and their memory becomes
            part of flat buffers.
        optimizer_cls: such as torch.optim.AdamW.
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
        replicate_group: ranks that hold the same shard as this one.
        bucket_size_mb: reduce in buckets of this size; 1 MB = 1e6 bytes. A larger parameter gets a bucket of
            its own.
        kwargs: for optimizer_cls.

    Attributes:
        inner: the optimizer over this rank's pieces, which are the keys of the state that this one shows.
    """

    inner: torch.optim.Optimizer

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: Axis | ProcessGroup | None = None,
        replicate_group: Axis | ProcessGroup | None = None,
        bucket_size_mb: float = 25.0,
        **kwargs: Any,
    ):
        self.axis = Axis.of(group)
        self.replicas = None if replicate_group is None else Axis.of(replicate_group)
        self.limit_bytes = bucket_size_mb * 1e6
        self.flats: list[FlatParameters] = []
        self.order = LaunchOrder[FlatGradients]()
        super().__init__(params, {})
        groups = [self.cut(group) for group in self.param_groups]
        self.inner = optimizer_cls(groups, **kwargs)
        self.state = self.inner.state

    def cut(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Flatten a group's parameters. Returns the group of this rank's pieces."""
        parameters = group["params"]
        names = group.get("param_names") or [f"parameter {index}" for index in range(len(parameters))]
        for flat in self.flatten(list(zip(names, parameters, strict=True))[::-1]):  # as backward comes
            self.flats.append(flat)
            self.attach(flat)
        piece_of = self.piece_by_parameter
        return {**group, "params": [piece_of[p] for p in parameters]}

    def flatten(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[FlatParameters]:
        """Flat buffers, (n,) each, of some parameters: one a bucket."""
        options: dict[str, Any] = {"replicas": self.replicas, "keeps_full": True, "keeps_gradients": True}
        return flatten_parameters(named, self.axis, limit_bytes=self.limit_bytes, **options)

    def attach(self, flat: FlatParameters) -> None:
        """Ask to be told when a parameter has its gradient."""
        self.order.append(flat.gradients)
        flat.on_gradients(partial(self.gradient_ready, flat))

    def gradient_ready(self, flat: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        """During backward a parameter's gradient goes into its bucket, and full buckets leave."""
        flat.gradients.add(index)
        if self.is_synchronizing:
            flat.gradients.ready.add(index)
            for gradients in self.order.take_full():
                reduce_scatter_gradients(gradients)

    def finish_gradient_synchronization(self) -> None:
        """Launch the buckets that backward left, and leave each rank the mean gradient of its pieces."""
        for gradients in self.order:
            reduce_scatter_gradients(gradients)
        for gradients in self.order:
            finish_mean(gradients)
        self.order.restart()

    def step(self, closure: Any = None) -> Any:
        """Update this rank's cut of the parameters, and gather the others'."""
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """The step itself, around which torch calls the hooks of `step`."""
        self.push_options()
        self.inner.step()
        updated = [flat for flat in self.flats if any(piece.grad is not None for piece in flat.pieces)]
        for flat in updated:
            flat.is_unsharded = False
            unshard(flat)
        for flat in updated:
            flat.wait_unshard()

    def push_options(self) -> None:
        """Let the inner optimizer have the options of this one's groups, such as a new learning rate."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({**group, "params": inner["params"]})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the pieces: those of the parameters have gone there."""
        self.inner.zero_grad(set_to_none)
