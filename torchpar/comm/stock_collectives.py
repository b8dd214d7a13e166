"""PyTorch's own operation for each collective, to be timed beside ours: only the benchmark uses it."""

import torch
import torch.distributed as dist

from torchpar.comm.collectives import Axis, _gather_equal, _reduce_scatter_equal


class StockAxis(Axis):
    """An axis whose collectives are PyTorch's as they come, and not counted. Pieces must be equal."""

    def all_reduce(self, tensor: torch.Tensor, **_: object) -> None:
        """Replace `tensor` by its sum over the axis."""
        dist.all_reduce(tensor, group=self.group)

    def broadcast(self, tensor: torch.Tensor, **_: object) -> None:
        """Replace `tensor` by that of the axis's first rank."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def all_gather(self, full: torch.Tensor, piece: torch.Tensor, **_: object) -> None:
        """Fill `full` with every rank's `piece`, one after the other."""
        _gather_equal(full, piece, group=self.group)

    def reduce_scatter(self, piece: torch.Tensor, full: torch.Tensor, **_: object) -> None:
        """Fill `piece` with this rank's piece of the sum of every rank's `full`."""
        _reduce_scatter_equal(piece, full, group=self.group)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, **_: object) -> None:
        """Send each rank its piece of `sent`, and fill `received` with theirs."""
        dist.all_to_all_single(received, sent, group=self.group)

    def shift(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Send to the next rank of the ring, and receive from the one before."""
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        messages = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
