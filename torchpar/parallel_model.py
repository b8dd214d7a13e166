"""The model and its optimizer as an engine returns them: the few things that the training loop uses."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from compare.contract.communication import RECORD
from torchpar.comm.collectives import Axis
from torchpar.offload import host_tensors

TensorsByName = Mapping[str, torch.Tensor]
Parameters = Mapping[str, nn.Parameter]
OptimizerMaker = Callable[..., torch.optim.Optimizer]
"""Makes the experiment's optimizer over parameters by the model's names: `optimizer.make_optimizer`."""
Fill = Callable[..., None]
"""Gives a model's parameters, or those of modules `within` it, their first values: `shards.fill_with`."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What parallelism along an axis adds to a rank's part of a model; parameters go by the model's names.

    Attributes:
        axis: the ranks; None where DTensors know over which axes they are spread.
        spread: names of parameters of which the ranks have different pieces; of others all have the whole.
        copies: names of what another rank of the axis has, too, and counts in the norm.
        finish: completes the gradients of these parameters, after the last backward of a step.
        gather: whole weights, gradients or moments from the pieces of all ranks, which call it together.
    """

    axis: Axis | None = None
    spread: Collection[str] = ()
    copies: frozenset[str] = frozenset()
    finish: Callable[[Parameters], None] = lambda parameters: None
    gather: Callable[[TensorsByName], TensorsByName] = lambda pieces: pieces


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A model under a layout.

    Attributes:
        module: called as the model is.
        optimizer: over `parameters`.
        parameters: what this rank updates, by the model's own names: a parameter, or this rank's piece of
            it (perhaps an empty one).
        strategies: innermost first.
        sharded_over: by name, the axes over which the pieces are spread; what is not there is whole.
        elements: by name, which elements of a rank's part along tp its piece is, row by row; else all.
        copies: names of what another rank along those axes has, too, and counts in the norm.
        updates: names of what this rank's optimizer updates, and the axis whose ranks share whole parameters
            out so; None where each updates its pieces.
        skip_sync: a context for every forward and backward of a step but the last.
        run_pipeline: instead of calling `module`: from a batch of uncut passes, and a context for each
            forward, to the mean loss; leaves gradients, if they are on.
        divides_late: gradients of microbatches are divided by their number after backward, not before.
        means_of: ranks over whose rows the loss is the mean that backward begins with; 1 for its own rows.
        end_evaluation: after the last forward without a backward.
        transient: flat tensors whose storage comes and goes, for the memory tracker.
        compiled: what a compiled `module` computes, as fields of a record's work; None if none is.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: Parameters
    strategies: tuple[Strategy, ...] = ()
    sharded_over: Mapping[str, tuple[Axis, ...]] = field(default_factory=dict)
    elements: Mapping[str, slice] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()
    updates: tuple[Collection[str], Axis] | None = None
    skip_sync: Callable[[], AbstractContextManager] | None = None
    run_pipeline: Callable[..., torch.Tensor] | None = None
    divides_late: bool = False
    means_of: int = 1
    end_evaluation: Callable[[], None] | None = None
    transient: tuple[torch.Tensor, ...] = ()
    compiled: Callable[..., Mapping[str, Any]] | None = None

    def under(self, strategy: Strategy) -> "ParallelModel":
        """The same under one more strategy, outside of those that it has."""
        spread = dict(self.sharded_over)
        if strategy.axis:
            spread |= {name: (*spread.get(name, ()), strategy.axis) for name in strategy.spread}
        strategies, copies = (*self.strategies, strategy), self.copies | strategy.copies
        return replace(self, strategies=strategies, sharded_over=spread, copies=copies)

    def no_sync(self) -> AbstractContextManager:
        """Only accumulate: around every forward and backward of a step but the last."""
        return self.skip_sync() if self.skip_sync else nullcontext()

    def finish_gradient_synchronization(self) -> None:
        """After the last backward: complete the gradients of `parameters`."""
        for strategy in self.strategies:
            strategy.finish(self.parameters)

    def full(self, pieces: TensorsByName) -> TensorsByName:
        """Whole tensors by name, in the model's own shapes, from every rank's pieces."""
        for strategy in self.strategies:
            pieces = strategy.gather(pieces)
        return pieces

    def weights(self) -> TensorsByName:
        """This rank's pieces of the weights."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def gradients(self) -> TensorsByName:
        """This rank's pieces of the gradients."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def held_gradients(self) -> list[torch.Tensor]:
        """All allocated gradients: of whole parameters, any shapes, and of this rank's pieces of them."""
        holders = [*self.module.parameters(), *self.parameters.values()]
        return [holder.grad for holder in holders if holder.grad is not None]

    def optimizer_state(self) -> list[torch.Tensor]:
        """This rank's optimizer state on the device: moments, shaped as the pieces, and step counts ()."""
        elsewhere = {id(tensor) for tensor in host_tensors(self.optimizer)}
        values = (value for entry in self.optimizer.state.values() for value in entry.values())
        return [value for value in values if torch.is_tensor(value) and id(value) not in elsewhere]

    def own_moments(self, key: str) -> TensorsByName:
        """This rank's pieces of a tensor of the optimizer's state, such as exp_avg, where it keeps them."""
        state = self.optimizer.state  # empty before the first update
        return {
            name: state[p][key].to(p.device) if state.get(p) else torch.zeros_like(p.detach())
            for name, p in self.parameters.items()
            if self.keeps_moments(name)
        }

    def moments(self, key: str) -> TensorsByName:
        """The same for all of `parameters`; all ranks call this together."""
        own = self.own_moments(key)
        if self.updates is None:
            return own
        zeros = {name: torch.zeros_like(p.detach()) for name, p in self.parameters.items()}
        for name, moment in zeros.items():
            if name in own:
                moment.copy_(own[name])
            self.updates[1].all_reduce(moment, purpose=RECORD)
        return zeros

    def keeps_moments(self, name: str) -> bool:
        """Whether this rank keeps the moments of its piece of a parameter."""
        return self.updates is None or name in self.updates[0]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local shard, (.., d / R, ..); any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor


def divide_gradient(loss: torch.Tensor, parts: int) -> torch.Tensor:
    """The loss (), of whose gradient each of several ranks shall have its part of a sum."""
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient / parts)
    return loss
