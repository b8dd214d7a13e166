"""An engine: the model and the optimizer under a layout, as the training loop uses them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from compare.contract.work import ObservedWork
from torchpar.sharding import Parameters, Sharding, TensorsByName

Fill = Callable[..., None]
"""Gives the parameters of a model, or of modules `within` it, their first values: `weights.fill_with`."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model and its optimizer under a layout.

    Attributes:
        module: called as the model is, with (B, T) arrays of this rank.
        optimizer: over `parameters`.
        parameters: the parameters that this rank updates, by nanoGPT's names: whole parameters or shards.
        sharding: where the shards of the parameters are.
        no_sync: a context for forward and backward of every pass of a step but the last.
        step_context: a context for the forwards and backwards of a step, and for an evaluation.
        run_pipeline: called instead of `module`, with a batch of all passes, a context for each forward, and
            the factor of the loss. Returns the mean loss; adds gradients, if gradients are enabled.
        end_evaluation: called after the last forward without a backward.
        loss_is_global: whether the loss, before backward, is the mean over the rows of all ranks.
        resized_buffers: flat tensors that FSDP frees and allocates again, for the memory profile.
        compiled: from the work of a step that the dispatcher saw to the work with that of compiled programs;
            None without compilation.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: Parameters
    sharding: Sharding = Sharding()  # noqa: RUF009
    no_sync: Callable[[], AbstractContextManager] = nullcontext
    step_context: Callable[[], AbstractContextManager] = nullcontext
    run_pipeline: Callable[..., torch.Tensor] | None = None
    end_evaluation: Callable[[], None] = lambda: None
    loss_is_global: bool = False
    resized_buffers: tuple[torch.Tensor, ...] = ()
    compiled: Callable[[ObservedWork], ObservedWork] | None = None

    def with_sharding(self, outer: Sharding) -> "Engine":
        """The engine with one more sharding, outside of its own."""
        return replace(self, sharding=self.sharding.within(outer))

    def finish_gradients(self) -> None:
        """Complete the gradients of `parameters`, after the last backward of a step."""
        self.sharding.finish_gradients(self.parameters)

    def gather(self, shards: TensorsByName) -> TensorsByName:
        """Full tensors by name, in nanoGPT's shapes, from the shards of all ranks."""
        return self.sharding.gather(shards)

    def weights(self) -> TensorsByName:
        """This rank's shards of the weights."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def gradients(self) -> TensorsByName:
        """This rank's shards of the gradients."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
