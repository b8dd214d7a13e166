"""Faults of our own modules: those that no collective tells apart."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch

from torchpar.faults.run_faults import zeroed_before_each_pass
from torchpar.manual.flat_parameters import FlatGradients
from torchpar.manual.megatron import reduce_from_region, reduce_scatter_from_region
from torchpar.manual.stage import Stage
from torchpar.manual.tensor_parallel import RowParallelLinear


def doubled_row_bias() -> AbstractContextManager:
    """Every rank adds the bias before the sum over ranks."""

    def forward(self: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
        partial = torch.nn.functional.linear(x, self.weight, self.bias)
        if self.sequence_dim is None:
            return reduce_from_region(partial, self.axis)
        return reduce_scatter_from_region(partial, self.axis, dim=self.sequence_dim)

    return patch.object(RowParallelLinear, "forward", forward)


@contextmanager
def overwritten_microbatch() -> Generator[None]:
    """Each pass's gradient, and in a pipeline each microbatch's, takes the place of those before it."""
    right, added = Stage.backward, FlatGradients.add

    def overwriting(self: Stage, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self.module.zero_grad()
        return right(self, microbatch, gradient)

    def overwritten(self: FlatGradients, index: int) -> None:
        self.used.discard(index)
        added(self, index)

    with (
        patch.object(Stage, "backward", overwriting),
        patch.object(FlatGradients, "add", overwritten),
        zeroed_before_each_pass(),
    ):
        yield
