"""ZeRO-1 by hand: each rank keeps the optimizer's state of a shard, and updates that shard.

Every rank has the whole module. A step is three lines:

    reduce-scatter     each rank gets the mean gradient of its shard, in buckets, during backward
    update             each rank updates its shard, whose state it keeps
    all-gather         every rank gets the updated parameters of all shards

Source: ZeRO (arXiv 1910.02054), stage 1.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from torchpar.comm.collectives import Axis
from torchpar.manual.data_parallel import BucketQueue, pack
from torchpar.manual.fully_sharded import AxisOf, FlatGradients, FlatParameters, pieces_of


class ShardedOptimizer(torch.optim.Optimizer):
    """An elementwise optimizer (SGD, Adam, ...) whose state is sharded.

    It is an Optimizer over the full parameters, and reduces their gradients in buckets, as `DataParallel`.
    After the last `backward` of a step call `finish_gradient_synchronization`, then `step`. Every parameter
    takes part in the loss. Backwards before the last run with `is_synchronizing` False.

    Args:
        optimizer_cls: makes `inner`, the optimizer over this rank's pieces, with the further arguments.
        axis_of: by parameter the ranks over which it is sharded. Gradients are means over all `shards`.
        replicas: the ranks that have the same shard.
        bucket_size_mb: the size of a bucket, in MB of 1e6 bytes.
    """

    is_synchronizing = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        axis_of: AxisOf,
        shards: Axis,
        replicas: Axis,
        bucket_size_mb: float,
        **kwargs: Any,
    ):
        super().__init__(params, {})
        how: dict[str, Any] = {"zero": 1, "replicas": replicas, "ranks": shards.size * replicas.size}
        self.flats = [
            FlatParameters(bucket, axis_of[bucket[0]], **how)
            for group in self.param_groups
            for bucket in pack(group["params"][::-1], bucket_size_mb * 1e6, axis_of)  # in backward's order
        ]
        self.queue = BucketQueue[FlatGradients](flat.gradients for flat in self.flats)
        for flat in self.flats:
            flat.on_gradients(partial(self.gradient_ready, flat))
        piece_of = pieces_of(self.flats)
        groups = [{**g, "params": [piece_of[p] for p in g["params"]]} for g in self.param_groups]
        self.inner = optimizer_cls(groups, **kwargs)
        self.state = self.inner.state  # its keys are the pieces

    def gradient_ready(self, flat: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        """Take a gradient that backward has accumulated, and reduce-scatter the buckets that are full."""
        flat.gradients.add(index, is_last=self.is_synchronizing)
        if self.is_synchronizing:
            for gradients in self.queue.pop_ready():
                gradients.start_reduce_scatter()

    def finish_gradient_synchronization(self) -> None:
        """Reduce the remaining buckets, and wait until every piece has its part of the mean."""
        for gradients in self.queue:
            gradients.start_reduce_scatter()
        for gradients in self.queue:
            gradients.finish()
        self.queue.next = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update this rank's pieces, and gather the pieces of all ranks."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({**group, "params": inner["params"]})  # such as a new learning rate
        self.inner.step()
        # Gather the updated parameters of all ranks: the buckets' gathers are under way together.
        for flat in self.flats:
            flat.is_gathered = False
            flat.start_gather()
        for flat in self.flats:
            flat.wait_gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)  # full parameters keep no gradient
