"""Order of unsharding: which units of a fully sharded module hold their parameters, and when.

Hooks around the module's forward and backward. One unit is current; the one to come is unsharded meanwhile,
in the order of the pass before (forward), or of this pass reversed (backward). The others are resharded, but
for those that run around the current one.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torchpar.comm.untraced import untraced
from torchpar.manual.zero.flat_parameters import FlatParameters
from torchpar.manual.zero.units import Unit, is_opaque, tensors_in


class UnshardScheduler:
    """Unshards each unit before one of its modules runs, and before backward reaches it.

    Args:
        units: at rest.
        unshard, reshard: the strategy's: begin to gather flat parameters, and free them.
        reshards: reshard what is not running; else all stays unsharded until `reshard_all`.
        inputs_only: modules whose backward does not read their weights.
        compute_dtype: cast a unit's floating-point inputs to this dtype, or None.
        on_unshard: called with a unit that has been unsharded.
        are_awaited: whether gradients are being accumulated, so that what is unsharded stays so after
            backward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        unshard: Callable[[FlatParameters], None],
        reshard: Callable[[FlatParameters], None],
        reshards: bool,
        inputs_only: tuple[type[nn.Module], ...],
        compute_dtype: torch.dtype | None,
        on_unshard: Callable[[Unit], None],
        are_awaited: Callable[[], bool],
    ):
        self._units, self._unshard, self._reshard = units, unshard, reshard
        self._reshards, self._inputs_only, self._compute_dtype = reshards, inputs_only, compute_dtype
        self._on_unshard, self._are_awaited = on_unshard, are_awaited
        self._is_backward = False
        self._backward_comes_again = False
        self._forward_order: list[tuple[Unit, bool]] = []  # of the pass before
        self._visits: list[tuple[Unit, bool]] = []  # of this one: which unit, and whether backward reads it
        self._unsharded: list[Unit] = []
        self._current: Unit | None = None
        for unit in units:
            hooks = _Hooks(self, unit)
            for module in unit.modules:
                module.register_forward_pre_hook(hooks.before_forward, prepend=True, with_kwargs=True)
                module.register_forward_hook(hooks.after_forward, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "UnshardScheduler":
        """As between two passes. ValueError if only some modules are copied, and not what shards them."""
        if any(id(flat) not in memo for unit in self._units for flat in unit.flats):
            raise ValueError(
                "a part of an FSDP module has only this rank's pieces: copy the FSDP module itself, or load "
                "its full_state_dict() into another module"
            )
        copied = memo[id(self)] = object.__new__(UnshardScheduler)
        at_rest = {"_visits": [], "_unsharded": [], "_current": None}
        between = {"_is_backward": False, "_backward_comes_again": False}
        copied.__dict__.update(copy.deepcopy({**self.__dict__, **at_rest, **between}, memo))
        return copied

    def begin_pass(self) -> None:
        """Another forward begins."""
        self._is_backward = False  # one that failed has not ended
        self.show_pieces()
        self._forward_order, self._visits = self._visits or self._forward_order, []

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments with floating-point tensors in the dtype to compute in."""
        if self._compute_dtype is None:
            return args, kwargs
        return tree_map(self._cast_one, (args, kwargs))

    def show_pieces(self) -> None:
        """Show a user the pieces between passes; memory stays."""
        for unit in self._unsharded:
            unit.show_pieces()

    @untraced
    def end_pass(self) -> None:
        """A forward has ended."""
        if torch.is_grad_enabled():
            for unit in self._unsharded:
                if not unit.is_opaque:
                    unit.show_pieces()
        else:
            self._reshard_or_show()

    def reshard_unit(self, unit: Unit) -> None:
        """Show a unit's pieces, and free its parameters."""
        unit.show_pieces()
        for flat in unit.flats:
            self._reshard(flat)

    def reshard_all(self) -> None:
        """Every unit is at rest."""
        for unit in self._unsharded:
            self.reshard_unit(unit)
        self._unsharded, self._current, self._backward_comes_again = [], None, False

    def before_forward(self, unit: Unit, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """One of the unit's modules is about to run on these arguments. Returns them, cast."""
        unit.running += 1
        if unit is not self._current or not self._visits or unit.is_stale or not unit.is_shown:
            self._visits.append((unit, False))
            self._enter(unit, self._next(self._forward_order, len(self._visits)))
        # Not only at the top: a buffer in another dtype may have promoted what comes from there.
        return self.cast(args, kwargs)

    def after_forward(self, unit: Unit, module: nn.Module, output: object) -> None:
        """One of the unit's modules has run."""
        unit.running -= 1
        # Not isinstance: a class made from one of these may have other weights, which backward reads.
        if type(module) in self._inputs_only or not torch.is_grad_enabled():
            return
        tensors = tensors_in(output)
        if not tensors and is_opaque(output):
            # nothing to hang a hook on: backward would find the unit resharded
            unit.spans = unit.is_opaque = True
        version = unit.version
        for tensor in tensors:
            tensor.register_hook(lambda gradient: self._before_backward(unit, version))
        if unit is self._visits[-1][0]:
            self._visits[-1] = (unit, True)

    @untraced
    def _before_backward(self, unit: Unit, version: int) -> None:
        if unit.version != version:
            raise RuntimeError(
                f"{unit.flats[0].names[0]}, or one gathered with it, was changed between this forward and "
                f"its backward: run forward again after optimizer.step()"
            )
        if not self._is_backward:
            self._is_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        # create_graph=True: the backward of this backward reads weights, and nothing announces where.
        self._backward_comes_again |= torch.is_grad_enabled()
        order = [visit for visit in reversed(self._visits) if visit[1]]
        index = next((i for i, (visited, _) in enumerate(order) if visited is unit), len(order))
        self._enter(unit, self._next(order, index + 1))

    @untraced
    def _end_backward(self) -> None:
        self._is_backward = False
        if self._are_awaited():
            self.show_pieces()
        else:  # finish need not be called
            self._reshard_or_show()

    def _reshard_or_show(self) -> None:
        if self._backward_comes_again:
            self.show_pieces()
        else:
            self.reshard_all()

    @staticmethod
    def _next(order: list[tuple[Unit, bool]], index: int) -> Unit | None:
        return order[index][0] if index < len(order) else None

    def _enter(self, unit: Unit, upcoming: Unit | None) -> None:
        """Unshard a unit, reshard those that are not running, and begin to unshard the one to come."""
        if unit is not self._current or unit not in self._unsharded or unit.is_stale or not unit.is_shown:
            if not (unit.spans and unit in self._unsharded):  # else it is around the current one
                self._current = unit
                self._reshard_idle(unit)
            self._start(unit)
            unit.wait_unshard()
            self._on_unshard(unit)
        if upcoming:
            self._start(upcoming)

    def _start(self, unit: Unit) -> None:
        if unit not in self._unsharded:
            self._unsharded.append(unit)
        elif not unit.is_stale:
            return
        for flat in unit.flats:
            self._unshard(flat)

    def _reshard_idle(self, entering: Unit) -> None:
        for unit in [unit for unit in self._unsharded if unit is not entering and unit.is_idle]:
            if self._reshards and not self._backward_comes_again:
                self._unsharded.remove(unit)
                self.reshard_unit(unit)

    def _cast_one(self, value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._compute_dtype)
        return value


@dataclass(frozen=True)
class _Hooks:
    """The hooks of a unit's modules: methods and no closures, so that those of a deep copy are its own."""

    scheduler: UnshardScheduler
    unit: Unit

    @untraced
    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return self.scheduler.before_forward(self.unit, args, kwargs)

    @untraced
    def after_forward(self, module: nn.Module, args: tuple, output: object) -> None:
        self.scheduler.after_forward(self.unit, module, output)
