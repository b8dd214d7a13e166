"""The model and its optimizer as an engine returns them: the few things that the training loop uses."""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from torchpar.comm.collectives import Axis
from torchpar.offload import host_tensors

TensorsByName = Mapping[str, torch.Tensor]
Gather = Callable[[TensorsByName], TensorsByName]


class OptimizerMaker(Protocol):
    """Makes the experiment's optimizer over parameters by the model's names: `optimizer.make_optimizer`."""

    def __call__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        wrap: Callable[..., torch.optim.Optimizer] = ...,
        separate_groups: Collection[str] = (),
    ) -> torch.optim.Optimizer:
        """`wrap(params, optimizer_cls, **kwargs)` makes the optimizer itself, if that is not as usual."""
        ...


class Fill(Protocol):
    """Gives parameters without memory their first values: `first_weights.FirstWeights.fill`."""

    def __call__(self, model: nn.Module, within: Iterable[nn.Module] | None = None) -> None:
        """All parameters of a model, or those of some of its modules."""
        ...


def keep_values(model: nn.Module, within: Iterable[nn.Module] | None = None) -> None:
    """A `Fill` for a model that has its values."""


def _nothing() -> None:
    pass


def _whole(name: str) -> tuple[Axis, ...]:
    return ()


def _all_elements(name: str) -> slice | None:
    return None


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A model under a layout.

    Attributes:
        module: called as the model is.
        optimizer: over `parameters`.
        parameters: what this rank updates, by the model's own names: a parameter, or this rank's piece of
            it (perhaps an empty one). Weights, gradients and the optimizer's state are read from these.
        no_sync: a context for every forward and backward of a step but the last.
        finish_gradient_synchronization: after the last backward; the gradients of `parameters` are complete
            after it.
        run_pipeline: instead of calling `module`: from a batch, whose passes are not cut into microbatches
            yet, and a context for each forward, to the mean loss; leaves gradients on the parameters.
        evaluate_pipeline: the same without gradients, which are left as they are.
        divides_late: gradients of microbatches are divided by their number after backward, not before.
        means_of: ranks over whose rows the loss is the mean that backward begins with; 1 for its own rows.
        end_evaluation: after the last forward without a backward.
        sharded_over: by name, the axes over which the pieces are spread: () where every rank has the whole.
        elements: by name, which elements of a rank's part along tp its piece is, row by row; None for all.
        copies: names of what another rank along those axes has, too, and counts in the norm.
        gathers: from pieces to whole tensors, innermost first: each takes and returns tensors by name, which
            may be weights, gradients or moments. All ranks call them together.
        transient: flat tensors whose storage comes and goes, for the memory tracker.
        compiles: `module` compiles itself when it is first called.
        compiled: what compiled `module`, in words, once it has run; empty where nothing does.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    no_sync: Callable[[], AbstractContextManager] = nullcontext
    finish_gradient_synchronization: Callable[[], None] = _nothing
    run_pipeline: Callable[..., torch.Tensor] | None = None
    evaluate_pipeline: Callable[..., torch.Tensor] | None = None
    divides_late: bool = False
    means_of: int = 1
    end_evaluation: Callable[[], None] = _nothing
    sharded_over: Callable[[str], tuple[Axis, ...]] = _whole
    elements: Callable[[str], slice | None] = _all_elements
    copies: frozenset[str] = frozenset()
    gathers: tuple[Gather, ...] = ()
    transient: tuple[torch.Tensor, ...] = ()
    compiles: bool = False
    compiled: Callable[[], str] = str

    def full(self, pieces: TensorsByName) -> TensorsByName:
        """Whole tensors by name, in the model's own shapes, from every rank's pieces."""
        for gather in self.gathers:
            pieces = gather(pieces)
        return pieces

    def weights(self) -> TensorsByName:
        """This rank's pieces of the weights."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def gradients(self) -> TensorsByName:
        """This rank's pieces of the gradients. Every parameter must have one."""
        gradients = {}
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients[name] = parameter.grad
        return gradients

    def held_gradients(self) -> list[torch.Tensor]:
        """All allocated gradients: of whole parameters, any shapes, and of this rank's pieces of them."""
        holders = [*self.module.parameters(), *self.parameters.values()]
        return [holder.grad for holder in holders if holder.grad is not None]

    def optimizer_state(self) -> list[torch.Tensor]:
        """This rank's optimizer state on the device: moments, shaped as the pieces, and step counts ()."""
        elsewhere = {id(tensor) for tensor in host_tensors(self.optimizer)}
        values = (value for entry in self.optimizer.state.values() for value in entry.values())
        return [value for value in values if torch.is_tensor(value) and id(value) not in elsewhere]

    def moments(self, key: str) -> TensorsByName:
        """This rank's pieces of one tensor of the optimizer's state, such as exp_avg."""
        return self.own_moments(key)

    def own_moments(self, key: str) -> TensorsByName:
        """The same, of the parameters whose moments this rank keeps; zero before the first update."""
        state = self.optimizer.state
        kept = {name: p for name, p in self.parameters.items() if self.keeps_moments(name)}
        return {
            name: state[p][key].to(p.device) if state.get(p) else torch.zeros_like(p.detach())
            for name, p in kept.items()
        }

    def keeps_moments(self, name: str) -> bool:
        """Whether this rank keeps the moments of its piece of a parameter."""
        return True

    def moments_spread_over(self, name: str) -> tuple[Axis, ...]:
        """The axes whose ranks keep different moments of a parameter: those over which its pieces are."""
        return self.sharded_over(name)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local shard, (.., d / R, ..); any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor
