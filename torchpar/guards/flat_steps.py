"""Guards of the optimizer's steps over sharded parameters: the `claims.Claimant` of FSDP."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchpar.comm.collectives import Axis
from torchpar.guards.claims import claim
from torchpar.guards.flat_parameters import FlatParameters
from torchpar.guards.parts import mark_part


class FlatSteps:
    """Lets optimizers update the pieces of some flats, as soon as they have their gradients.

    Args:
        flats: whose pieces and parameters are claimed.
        parts: axes over which parameters were cut before, by name.
    """

    kind = "FSDP"

    def __init__(self, flats: Sequence[FlatParameters], parts: Mapping[str, Axis] | None = None):
        self._all, self._parts = flats, parts or {}
        self._flat_of: dict[torch.Tensor, FlatParameters] = {
            piece: flat for flat in flats for piece in flat.pieces
        }
        self._names: dict[torch.Tensor, str] = {}
        pieces: dict[str, torch.Tensor] = {}
        for flat in flats:
            self._names.update(zip(flat.parameters, flat.names, strict=True))
            pieces.update(zip(flat.names, flat.pieces, strict=True))
        self._claimed = {**pieces, **{f"{name} (unsharded)": p for p, name in self._names.items()}}
        self._claim()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A deep copy, whose pieces are its own."""
        self.__dict__.update(state)
        self._claim()

    def _claim(self) -> None:
        claim(self, self._claimed)
        for flat in self._all:
            for name, piece in zip(flat.names, flat.pieces, strict=True):
                mark_part(piece, flat.axis, *([self._parts[name]] if name in self._parts else []))

    def before_forward(self) -> None:
        """RuntimeError if pieces were converted, or updated without their gradients."""
        for flat in self._all:
            flat.keep_memory("pieces")
            if flat.is_changed and flat.gradients.is_awaited:
                raise RuntimeError(
                    f"{flat.names[0]}, or one gathered with it, was changed before it had its gradient of "
                    f"the last backward: call finish_gradient_synchronization() before any update"
                )

    def before_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """RuntimeError if gradients of the pieces, (n,) each, are late, or can never come."""
        for parameter in parameters:
            if parameter in self._names:
                raise RuntimeError(
                    f"{type(optimizer).__name__} has {self._names[parameter]} as it was before FSDP, which "
                    f"gets no gradients: make the optimizer over parameters() of the FSDP"
                )
        for flat in self._flats(parameters):
            flat.gradients.require_finished("step()")

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """RuntimeError if gradients of the pieces, (n,) each, are late."""
        for flat in self._flats(parameters):
            flat.gradients.require_finished("clip_grad_norm_()")

    def after_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Mark gathered parameters as old: fused kernels update pieces, (n,), and count no version."""
        flats = self._flats(parameters)
        torch.autograd.graph.increment_version([flat.shard for flat in flats])
        for flat in flats:  # a closure may have forgotten it
            flat.gradients.require_finished("step()")

    def _flats(self, parameters: Sequence[torch.Tensor]) -> list[FlatParameters]:
        return list(dict.fromkeys(self._flat_of[p] for p in parameters if p in self._flat_of))
