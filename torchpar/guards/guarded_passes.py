"""Passes through `FSDP`, guarded: when a unit is unsharded, shown and resharded, whatever happens between.

Guards: units that are nested or found by themselves; parameters that are converted, replaced or updated
meanwhile; second derivatives; passes that fail; buffers; deep copies; torch.compile. `compute_dtype`, which
no engine needs, is here, too.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from compare.contract.communication import REPLICATE
from torchpar.comm.untraced import untraced
from torchpar.guards.buffers import Buffers
from torchpar.guards.flat_parameters import FlatParameters
from torchpar.guards.flat_steps import FlatSteps
from torchpar.guards.units import Structure, Unit, Units, groups_of, is_opaque, make_units
from torchpar.guards.weak_hooks import weakly
from torchpar.manual import fully_sharded as lesson
from torchpar.manual.fully_sharded import tensors_in
from torchpar.manual.megatron.split import split_layers_of


class GuardedPasses(lesson.FSDP):
    """`FSDP` from the first forward of a step to the end of its backward.

    Args:
        module, units, compute_dtype, broadcast_buffers, options: see `guards.fully_sharded.FSDP`.
    """

    flats: list[Any]  # `flat_parameters.FlatParameters`, which the lesson knows as its own
    units: list[Any]  # `units.Unit`

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Units | None,
        compute_dtype: torch.dtype | None,
        broadcast_buffers: bool,
        **options: Any,
    ):
        super().__init__(module, units=groups_of(module, units), compute_dtype=compute_dtype, **options)
        self._compute_dtype = compute_dtype
        self._hooked: set[nn.Parameter] = set()
        self._is_backward = self._backward_comes_again = False
        self._shared_buffers = Buffers(module, [self.axis, self.replicas], each_pass=broadcast_buffers)
        self._shared_buffers.broadcast(purpose=REPLICATE)
        self._steps = FlatSteps(self.flats, {n: layer.axis for n, layer in split_layers_of(module).items()})
        self._structure = Structure(module)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: at rest. What is cut comes first, so that modules and hooks find copied pieces."""
        for flat in self.flats:
            flat.keep_memory("pieces")
        passes = {"_visits": [], "_unsharded": [], "_current": None, "_reducing": None}
        flags = {"is_synchronizing": True, "_is_backward": False, "_backward_comes_again": False}
        return {"flats": self.flats, **super().__getstate__(), **passes, **flags, "_hooked": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the copy."""
        super().__setstate__(state)
        for unit in self.units:
            lesson.reshard_unit(unit)

    def make_units(self, units: Sequence[Sequence[nn.Module]], **options: Any) -> list[Unit]:
        """Cut the parameters: each goes to the innermost unit around it."""
        made = make_units(self.module, units, self.axis, **options)
        for unit in made:
            lesson.reshard_unit(unit)
        return made

    def attach(self, unit: Any) -> None:
        """Ask to be told when a module of the unit runs; of gradients when it has been unsharded."""
        hooks = _Hooks(self, unit)
        for module in unit.modules:
            module.register_forward_pre_hook(hooks.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(hooks.after_forward, always_call=True)

    def forward(self, *args, **kwargs):
        """The module's own."""
        args, kwargs = self._begin(args, kwargs)
        try:
            return self.module(*args, **kwargs)
        finally:
            self.end_pass()

    @untraced
    def _begin(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self._shared_buffers.before_forward(synchronizing=self.is_synchronizing)
        self._steps.before_forward()
        self._is_backward = False  # one that failed has not ended
        self._show_pieces()
        self.begin_pass()
        for unit in self.units:
            unit.begin_pass()
        self._structure.require_same()
        return self.cast(args, kwargs)

    @untraced
    def end_pass(self) -> None:
        """A forward has ended: a user sees pieces again, but where backward may look unseen."""
        if torch.is_grad_enabled():
            for unit in [unit for unit in self.units if unit in self._unsharded and not unit.is_opaque]:
                unit.show_pieces()
        else:
            self._reshard_or_show()

    def after_forward(self, unit: Any, module: nn.Module, args: tuple, output: object) -> None:
        """A module of the unit has run, or failed: backward will come through what it returned."""
        unit.running -= 1
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
        self.before_backward(unit)

    @untraced
    def _end_backward(self) -> None:
        self._is_backward = False
        if not self.is_synchronizing or any(flat.gradients.is_awaited for flat in self.flats):
            self._show_pieces()
        else:  # finish need not be called
            self._reshard_or_show()

    def enter(self, unit: Any, upcoming: Any) -> None:
        """Unshard a unit, and have the gradients of its parameters taken in; also if it was frozen before."""
        super().enter(unit, upcoming)
        for flat in unit.flats:
            for index, parameter in enumerate(flat.parameters):
                if parameter.requires_grad and parameter not in self._hooked:
                    self._hooked.add(parameter)
                    hook = weakly(self._take_gradient, unit, flat, index)
                    parameter.register_post_accumulate_grad_hook(hook)

    def is_current(self, unit: Any) -> bool:
        """Whether the unit was entered last, and its parameters are there and unchanged."""
        return super().is_current(unit) and unit.is_shown and not unit.is_stale

    def make_current(self, unit: Any) -> None:
        """Leave the current unit for another one, but for one that runs around it."""
        if not (unit.spans and unit in self._unsharded):
            super().make_current(unit)

    def may_reshard(self, unit: Any) -> bool:
        """False for a unit around the running one, and where a second derivative may read it."""
        return super().may_reshard(unit) and unit.is_idle and not self._backward_comes_again

    def unshard_unit(self, unit: Any) -> None:
        """Begin to gather a unit's parameters, if they are not there, or old."""
        if unit in self._unsharded and unit.is_stale:
            for flat in unit.flats:
                lesson.unshard(flat)
        super().unshard_unit(unit)

    def reshard_all(self) -> None:
        """Every unit is at rest."""
        super().reshard_all()
        self._backward_comes_again = False

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments with floating-point tensors in the dtype to compute in."""
        if self._compute_dtype is None:
            return args, kwargs
        return tree_map(self._cast_one, (args, kwargs))

    def _cast_one(self, value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._compute_dtype)
        return value

    def _take_gradient(self, unit: Unit, flat: FlatParameters, index: int) -> None:
        self.gradient_ready(unit, flat, index, flat.parameters[index])

    def _show_pieces(self) -> None:
        """Show a user the pieces between passes; memory stays."""
        for unit in self._unsharded:
            unit.show_pieces()

    def _reshard_or_show(self) -> None:
        if self._backward_comes_again:
            self._show_pieces()
        else:
            self.reshard_all()


@dataclass(frozen=True)
class _Hooks:
    """The hooks of a unit's modules: methods and no closures, so that those of a deep copy are its own."""

    sharded: GuardedPasses
    unit: Unit

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hooks":
        """Of the copy. ValueError if only some modules are copied, and not what shards them."""
        if id(self.sharded) not in memo:
            raise ValueError(
                "a part of an FSDP module has only this rank's pieces: copy the FSDP module itself, or load "
                "its full_state_dict() into another module"
            )
        return _Hooks(memo[id(self.sharded)], copy.deepcopy(self.unit, memo))

    @untraced
    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.unit.running += 1
        self.sharded.before_forward(self.unit)
        # Not only at the top: a buffer in another dtype may have promoted what comes from there.
        return self.sharded.cast(args, kwargs)

    @untraced
    def after_forward(self, module: nn.Module, args: tuple, output: object) -> None:
        self.sharded.after_forward(self.unit, module, args, output)
