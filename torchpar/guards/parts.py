"""Parameters of which this rank has a part: PyTorch's own tools, too, take overflow and norm of all parts.

A wrapper marks its pieces with the axes over which they are cut. `torch.amp.GradScaler` and
`torch.nn.utils.clip_grad_norm_` look at one rank's gradients alone: each would skip, or scale, for itself.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from torchpar.comm.collectives import Axis
from torchpar.guards.claims import claimant_of
from torchpar.optimizer import clip_gradients, flags_on_all


def mark_part(parameter: torch.Tensor, *axes: Axis) -> None:
    """Note the axes over which a parameter, any shape, is cut, in place of those noted before."""
    watch()
    parameter.cut_over = tuple(axis for axis in axes if axis.size > 1)  # ty: ignore[missing-attribute]


def axes_of(parameter: torch.Tensor) -> tuple[Axis, ...]:
    """The axes over which a parameter is cut; () if it is whole."""
    return getattr(parameter, "cut_over", ())


@functools.cache
def watch() -> None:
    """From now on PyTorch's GradScaler and clip_grad_norm_ know of parts, and of awaited gradients."""
    unscale = torch.amp.GradScaler._unscale_grads_
    torch.amp.GradScaler._unscale_grads_ = _agreeing(unscale)  # ty: ignore[invalid-assignment]
    clip = _clipping_parts(clip_grad.clip_grad_norm_)
    nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = clip  # ty: ignore[invalid-assignment]


def _agreeing(unscale: Callable[..., dict]) -> Callable[..., dict]:
    """GradScaler's search for what is not finite; what one rank finds in its part, all have found."""

    @functools.wraps(unscale)
    def unscale_on_all(self: Any, optimizer: torch.optim.Optimizer, *args: Any) -> dict:
        found = unscale(self, optimizer, *args)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        axes = dict.fromkeys(axis for p in parameters for axis in axes_of(p))
        if not axes:
            return found
        # A rank whose parts are all empty has looked at none; where no rank has, GradScaler says so.
        device = parameters[0].device
        flags = torch.zeros(2, device=device)
        flags[0] = float(bool(found))
        for own in found.values():
            flags[1] = torch.maximum(flags[1], own.squeeze().to(device))
        flags_on_all(flags, axes)
        return dict.fromkeys(found or [device], flags[1:]) if flags[0] else found

    return unscale_on_all


def _clipping_parts(clip: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`clip_grad_norm_` by the norm of all parts, each counted once."""

    @functools.wraps(clip)
    def clip_all(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [parameters] if torch.is_tensor(parameters) else list(parameters)
        for parameter in given:
            if claimant := claimant_of(parameter):
                claimant.before_clipping([parameter])
        if not any(axes_of(p) for p in given):
            return clip(given, max_norm, norm_type, error_if_nonfinite, foreach)
        if norm_type != 2.0:
            raise ValueError(f"norm_type = {norm_type} of parameters of which ranks have parts: give 2.0")
        named = {str(number): parameter for number, parameter in enumerate(given)}
        norm = clip_gradients(named, lambda name: axes_of(named[name]), max_norm=max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the total norm is {norm}: it cannot be clipped")
        return norm

    return clip_all
