"""PyTorch's own operation for each collective, to be timed beside ours in the benchmark."""

import torch
import torch.distributed as dist

from torchpar.comm.collectives import Axis, _gather_equal, _reduce_scatter_equal


class StockAxis(Axis):
    """An axis with PyTorch's own collectives, uncounted. Shards must be equal."""

    def all_reduce(self, tensor: torch.Tensor, **_: object) -> None:
        """Replace `tensor`, any shape, by its sum over the axis."""
        dist.all_reduce(tensor, group=self.group)

    def broadcast(self, tensor: torch.Tensor, **_: object) -> None:
        """Replace `tensor`, any shape, by that of the axis's first rank."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def all_gather(self, full: torch.Tensor, piece: torch.Tensor, **_: object) -> None:
        """Fill `full` (n,) with every rank's shard (n / size,) in order."""
        _gather_equal(full, piece, group=self.group)

    def reduce_scatter(self, piece: torch.Tensor, full: torch.Tensor, **_: object) -> None:
        """Fill `piece` (n / size,) with this rank's shard of the sum of every rank's `full` (n,)."""
        _reduce_scatter_equal(piece, full, group=self.group)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, **_: object) -> None:
        """Send each rank its part of `sent` (n,), and fill `received` (n,) with theirs."""
        dist.all_to_all_single(received, sent, group=self.group)

    def shift(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Send to the next rank of the ring, and receive from the one before; any shape."""
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        messages = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
