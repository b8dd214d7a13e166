"""Buffers: what modules keep beside parameters, such as BatchNorm's statistics, alike on all ranks."""

from collections.abc import Sequence

import torch
from torch import nn

from compare.contract.communication import BUFFERS
from torchpar.comm.collectives import Axis, ProcessGroup


def broadcast_buffers(module: nn.Module, group: Axis | ProcessGroup | None = None) -> None:
    """Give every rank the first rank's buffers: for modules that no wrapper does this for.

    Each rank's statistics are those of its own share of the data, and drift apart. Call it where
    DistributedDataParallel would, before each forward that is to be trained on. Sends nothing if there are
    no buffers; else all of a device in one broadcast.

    Args:
        module: the same on all ranks.
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
    """
    Buffers(module, [Axis.of(group)], each_pass=False).broadcast()


class Buffers:
    """A module's buffers, made the first rank's when DistributedDataParallel would.

    Args:
        module: its buffers are listed anew each time: modules may replace them.
        axes: one after the other; each passes on what came along the one before.
        each_pass: whether `before_forward` does anything.
    """

    def __init__(self, module: nn.Module, axes: Sequence[Axis | None], *, each_pass: bool):
        self._module, self._each_pass = module, each_pass
        self._axes = [axis for axis in axes if axis and axis.size > 1]
        self._are_due = True
        self._versions: dict[torch.Tensor, int] = {}

    def before_forward(self, *, synchronizing: bool) -> None:
        """Broadcast, unless the forward before was one of evaluation, or under no_sync: DDP's rule.

        Args:
            synchronizing: the gradients of this forward are to be reduced.
        """
        if self._each_pass and self._are_due:
            self.broadcast()
        self._are_due = synchronizing and torch.is_grad_enabled()

    @torch.no_grad()
    def broadcast(self, *, purpose: str = BUFFERS) -> None:
        """Give every rank the first rank's."""
        if not self._axes:
            return
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for buffer in self._module.buffers():
            by_device.setdefault(buffer.device, []).append(buffer)
        for buffers in by_device.values():
            buffers.sort(key=lambda buffer: -buffer.itemsize)  # each is then aligned in what is sent
            sent = torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers])
            for axis in self._axes:
                axis.broadcast(sent, purpose=purpose)
            for buffer, part in zip(buffers, sent.split([b.nbytes for b in buffers]), strict=True):
                self._write(buffer, part.view(buffer.dtype).view(buffer.shape))
        self._versions = {buffer: buffer._version for buffer in self._module.buffers()}

    def _write(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Autograd is told if the module itself told it of a change: a backward may need the value before.

        Else it is a constant, or one that BatchNorm changes unseen and its backward does not read: a forward
        between another and its backward (two batches of a GAN, microbatches) must not be an error.
        """
        is_changed = self._versions.get(buffer, buffer._version) != buffer._version
        (buffer if is_changed else buffer.data).copy_(value)
