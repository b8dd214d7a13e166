"""Gradient buckets: flat memory for gradients that are averaged together, and the order of the buckets."""

import itertools

import torch
from torch import nn

from torchpar.comm.handles import Work
from torchpar.manual.launch_order import LaunchOrder
from torchpar.manual.packs import pack


class Bucket:
    """Parameters of one dtype and device whose gradients are averaged together.

    Attributes:
        names, parameters: in the same order.
        work: the collective under way on `buffer`, or None.
    """

    def __init__(self, names: list[str], parameters: list[nn.Parameter]):
        self.names = names
        self.parameters = parameters
        self.work: Work | None = None
        self._starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        # Strides like the parameter's, where it is dense: what autograd wants of a gradient that it adds to.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        self._pending = set(range(len(parameters)))
        self._buffer: torch.Tensor | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """The gradients end to end (n,): those on the parameters are views of it."""
        assert self._buffer is not None
        return self._buffer

    @property
    def is_full(self) -> bool:
        """True if every gradient of this step is in."""
        return not self._pending

    @property
    def pending(self) -> list[int]:
        """Indices of parameters whose gradient is not in yet."""
        return sorted(self._pending)

    def add(self, index: int, *, ranks: int) -> None:
        """Take in the gradient of the parameter at `index`, divided by `ranks`: the sum is then the mean.

        With several parameters the gradient moves into the buffer and becomes a view of it: one copy, in
        which it is divided, none back, and no second gradient in memory. A single one is its own buffer, if
        it can be.
        """
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None, f"{self.names[index]} has no gradient"
        self._pending.remove(index)
        if len(self.parameters) == 1 and gradient.is_contiguous():
            self._buffer = gradient.view(-1).div_(ranks)
            return
        if self._buffer is None:
            self._buffer = gradient.new_empty(self._starts[-1])
        slot = self._buffer.as_strided(parameter.shape, self._strides[index], self._starts[index])
        parameter.grad = torch.div(gradient, ranks, out=slot)

    def wait(self) -> None:
        """Wait for the collective under way, if there is one."""
        if self.work:
            self.work.wait()
        self.work = None

    def reset(self) -> None:
        """Forget the step; the gradients keep the buffer alive while they are in use."""
        self.wait()  # only the collective may write to the buffer until then
        self._pending = set(range(len(self.parameters)))
        self._buffer = None


class GradientBuckets(LaunchOrder[Bucket]):
    """Buckets in the order in which all ranks reduce them."""

    def reset(self) -> None:
        """Forget the step."""
        for bucket in self:
            bucket.reset()
        self.restart()


def make_buckets(module: nn.Module, limit_bytes: float) -> GradientBuckets:
    """Split a module's trainable parameters, in reverse, into buckets of one dtype and device each.

    Args:
        module: tied parameters count once.
        limit_bytes: a bucket is closed before it would pass this; 0 gives every parameter its own.
    """
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    packs = pack(trainable[::-1], limit_bytes)
    return GradientBuckets([Bucket([name for name, _ in named], [p for _, p in named]) for named in packs])
