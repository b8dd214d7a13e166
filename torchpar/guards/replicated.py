"""Parameters that every rank holds in full: alike from the start, claimed, and not stepped over too early."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchpar.comm.collectives import Axis
from torchpar.guards.claims import claim, require_unclaimed
from torchpar.guards.parts import watch
from torchpar.manual.replicate import replicate


class ReplicatedParameters:
    """A module's parameters, of which the first rank's values count, and whose gradients are to be averaged.

    No optimizer may step over one while its gradient is still this rank's own: `claims.Claimant`.

    Args:
        module: its parameters are listed anew each time: users freeze, convert and replace them.
        axis: the ranks.

    Attributes:
        own_gradients: names of the parameters whose gradient is not averaged yet.
    """

    kind = "DataParallel"

    def __init__(self, module: nn.Module, axis: Axis):
        require_unclaimed(dict(module.named_parameters()))
        watch()
        self._module, self._axis = module, axis
        self._known: set[nn.Parameter] = set()
        self._trainable: list[tuple] = []
        self.own_gradients: dict[torch.Tensor, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which `claim` parameters of their own: between two steps."""
        return {**self.__dict__, "own_gradients": {}, "_known": set(), "_trainable": []}

    @property
    def are_changed(self) -> bool:
        """True if parameters were frozen, unfrozen, converted or replaced since `refresh`."""
        return self._trainable != self._list_trainable()

    def refresh(self) -> None:
        """Replicate the parameters that have come since, and claim those that there are."""
        replicate((p for p in self._module.parameters() if p not in self._known), [self._axis])
        self.claim()

    def claim(self) -> None:
        """Be asked before an optimizer steps over one of these; also for a copy, whose values are alike."""
        self._known = set(self._module.parameters())
        self._trainable = self._list_trainable()
        claim(self, dict(self._module.named_parameters()))

    def before_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """RuntimeError if a parameter, any shape, still has this rank's own gradient."""
        self._require_finished(parameters, "step()")

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """As `before_step`: parameters of any shapes."""
        self._require_finished(parameters, "clip_grad_norm_()")

    def after_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """As `before_step`, after a closure has made the gradients, of any shapes."""
        self.before_step(optimizer, parameters)

    def _require_finished(self, parameters: Sequence[torch.Tensor], what: str) -> None:
        for parameter in parameters:
            if parameter in self.own_gradients and parameter.grad is not None:
                raise RuntimeError(
                    f"call finish_gradient_synchronization() before {what}: the gradient of "
                    f"{self.own_gradients[parameter]} is still this rank's own"
                )

    def _list_trainable(self) -> list[tuple]:
        return [(id(p), p.dtype, p.device, p.shape) for p in self._module.parameters() if p.requires_grad]
