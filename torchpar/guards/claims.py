"""Claims on parameters' gradients, so that no optimizer steps without their synchronisation.

A wrapper claims the parameters whose gradients it reduces, and is asked around every `step()` of a torch
Optimizer that holds one of them. Nothing is written on the parameters themselves.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchpar.comm.untraced import untraced


class Claimant(Protocol):
    """An owner of gradients: it reduces them, and knows which of them are not reduced yet.

    Attributes:
        kind: its class, as a user knows it.
    """

    kind: str

    def before_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """RuntimeError if the optimizer must not step now over these, any shapes; a closure skips this."""
        ...

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """RuntimeError if PyTorch's own clipping would miss the gradients of these tensors, any shapes."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer has updated some of these claimed parameters, any shapes."""
        ...


_claims: dict[int, weakref.ref[Any]] = {}  # by id: a claimant keeps its parameters alive


def claim(claimant: Claimant, named: Mapping[str, torch.Tensor]) -> None:
    """Claim parameters of any shapes, by name, in place of the claimant's former ones.

    Raises:
        ValueError: another one has claimed one of them.
    """
    _watch_optimizers()
    require_unclaimed(named, by=claimant)
    _release(ref := weakref.ref(claimant))
    _claims.update((id(parameter), ref) for parameter in named.values())
    weakref.finalize(claimant, _release, ref).atexit = False


def require_unclaimed(named: Mapping[str, torch.Tensor], *, by: object = None) -> None:
    """ValueError if a claimant other than `by` has one of these parameters, any shapes."""
    for name, parameter in named.items():
        if hasattr(parameter, "device_mesh"):
            made = "which PyTorch's own parallelism has made"
            raise ValueError(f"{name} is a DTensor, {made}: use one of the two")
        other = claimant_of(parameter)
        if other is not None and other is not by:
            raise ValueError(
                f"gradients of {name} are already synchronised by {a(other.kind)}: use one of the two, "
                f"around a module of its own"
            )


def claimant_of(parameter: torch.Tensor) -> Claimant | None:
    """The claimant that synchronises the gradients of a parameter, any shape; None if it has none."""
    claimant = _claims.get(id(parameter))
    return claimant() if claimant else None


def a(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'AEFIO' else 'a'} {noun}"


def _release(claimant: "weakref.ref[Any]") -> None:
    for key in [key for key, other in _claims.items() if other is claimant]:
        del _claims[key]


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@untraced
def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        for claimant, parameters in _claimed(optimizer).items():
            claimant.before_step(optimizer, parameters)


@untraced
def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    for claimant, parameters in _claimed(optimizer).items():
        claimant.after_step(optimizer, parameters)


def _claimed(optimizer: torch.optim.Optimizer) -> dict[Any, list[nn.Parameter]]:
    claimed: dict[weakref.ref[Any], list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if claimant := _claims.get(id(parameter)):
                claimed.setdefault(claimant, []).append(parameter)
    return {claimant(): parameters for claimant, parameters in claimed.items()}
