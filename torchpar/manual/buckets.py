"""Buckets: gradients that are averaged together, in one all-reduce."""

import itertools

import torch
from torch import nn

from compare.contract.communication import GRADIENTS
from torchpar.comm.collectives import Axis, Work


class Bucket:
    """Parameters of one dtype and device whose gradients are reduced in one all-reduce."""

    def __init__(self, names: list[str], parameters: list[nn.Parameter]):
        self.names = names
        self.parameters = parameters
        self._starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        self._pending = set(range(len(parameters)))
        self._buffer: torch.Tensor | None = None
        self._work: Work | None = None

    @property
    def is_ready(self) -> bool:
        """Whether every gradient of this step is in."""
        return not self._pending

    @property
    def pending(self) -> list[int]:
        """Places whose gradient is not in yet."""
        return sorted(self._pending)

    def awaits(self, place: int) -> bool:
        """Whether the gradient at `place` is not in yet."""
        return place in self._pending

    def add(self, place: int) -> None:
        """Take in the gradient of the parameter at `place`.

        With several parameters the gradient moves into the bucket and becomes a view of it: one copy,
        none back, and no second gradient in memory. A single one is reduced where it lies, if it can be.
        """
        parameter = self.parameters[place]
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(f"a hook on {self.names[place]} takes its gradient away: remove the hook")
        self._pending.remove(place)
        if gradient.is_sparse:
            raise RuntimeError(f"{self.names[place]} has a sparse gradient: use a dense embedding")
        if len(self.parameters) == 1 and gradient.is_contiguous():
            self._buffer = gradient.view(-1)
            return
        if self._buffer is None:
            self._buffer = gradient.new_empty(self._starts[-1])
        # Strides like the parameter's, where it is dense: what autograd wants of a gradient that it adds to.
        strides = torch.empty_like(parameter, device="meta").stride()
        slot = self._buffer.as_strided(parameter.shape, strides, self._starts[place])
        slot.copy_(gradient)
        parameter.grad = slot

    def launch(self, axis: Axis) -> None:
        """Begin to sum the bucket over the ranks."""
        assert self._buffer is not None
        self._work = axis.start_all_reduce(self._buffer, purpose=GRADIENTS)

    def finish(self, axis: Axis) -> None:
        """Wait for the sum, make it the mean, and be ready for the next step."""
        assert self._work is not None
        assert self._buffer is not None
        self._work.wait()
        self._work = None
        self.divide(self._buffer, axis.size)
        self.reset()

    @staticmethod
    def divide(total: torch.Tensor, ranks: int) -> None:
        """Turn a sum over ranks into their mean."""
        total.div_(ranks)

    def reset(self) -> None:
        """Forget the step; the gradients keep the buffer alive as long as anybody wants them."""
        if self._work:
            self._work.wait()  # nobody else may write to these gradients
        self._pending = set(range(len(self.parameters)))
        self._buffer = self._work = None


def make_buckets(module: nn.Module, limit_bytes: float) -> list[Bucket]:
    """Split a module's trainable parameters, in reverse, into buckets of one dtype and device each.

    Args:
        module: tied parameters count once.
        limit_bytes: a bucket is closed before it would pass this; 0 gives every parameter its own.
    """
    buckets: list[tuple[list[str], list[nn.Parameter]]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[str], list[nn.Parameter]]] = {}
    for name, parameter in reversed(list(module.named_parameters())):
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        bucket = open_buckets.get(kind)
        if bucket is None or sum(p.nbytes for p in bucket[1]) + parameter.nbytes > limit_bytes:
            bucket = open_buckets[kind] = ([], [])
            buckets.append(bucket)
        bucket[0].append(name)
        bucket[1].append(parameter)
    return [Bucket(names, parameters) for names, parameters in buckets]
