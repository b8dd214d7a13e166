"""ZeRO-1 by hand: each rank keeps the optimizer's state for its cut of the parameters, and updates that.

The module stays whole on every rank. A step is three lines:

    reduce_scatter     each rank gets the mean gradient of its shard, in buckets, during backward
    optimizer.step     on this rank's shard, whose state it keeps
    all_gather         every rank gets the updated parameters of all

Source: ZeRO (arXiv 1910.02054), stage 1.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from torchpar.comm.collectives import Axis
from torchpar.manual.data_parallel import LaunchOrder
from torchpar.manual.flat import Accumulates, pack
from torchpar.manual.flat_parameters import FlatGradients, FlatParameters, pieces_of
from torchpar.manual.fully_sharded import finish_mean, reduce_scatter_gradients, unshard


class ShardedOptimizer(Accumulates, torch.optim.Optimizer):
    """An optimizer that treats elements one by one (SGD, Adam, ...), its state shared out over a group.

    It is a torch Optimizer over the whole parameters, which become the first rank's, and reduces their
    gradients in buckets, as `DataParallel`. After the last backward of a step call
    `finish_gradient_synchronization()`, then `step()`; every parameter takes part in the loss.

    The other arguments are for `optimizer_cls`: `inner` is one over this rank's pieces, which are the keys of
    the state that this one shows.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        axis: Axis,
        replicas: Axis,
        bucket_size_mb: float,
        **kwargs: Any,
    ):
        super().__init__(params, {})
        self.flats: list[FlatParameters] = []
        for number, of_group in enumerate(self.param_groups):
            named = [(f"parameter {n} of group {number}", p) for n, p in enumerate(of_group["params"])]
            for bucket in pack(named[::-1], bucket_size_mb * 1e6):  # as backward comes
                self.flats.append(FlatParameters(bucket, axis, zero=1, replicas=replicas))
        self.order = LaunchOrder[FlatGradients](flat.gradients for flat in self.flats)
        for flat in self.flats:
            flat.on_gradients(partial(self.gradient_ready, flat))
        piece_of = pieces_of(self.flats)
        groups = [{**g, "params": [piece_of[p] for p in g["params"]]} for g in self.param_groups]
        self.inner = optimizer_cls(groups, **kwargs)
        self.state = self.inner.state

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
        self.order.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update this rank's cut of the parameters, and gather the others'."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({**group, "params": inner["params"]})  # such as a new learning rate
        self.inner.step()
        for flat in self.flats:
            flat.is_unsharded = False
            unshard(flat)
        for flat in self.flats:
            flat.wait_unshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)  # of the pieces: no parameter keeps one
