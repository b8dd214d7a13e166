"""`FSDP` for any module, guarded: `manual.fully_sharded` is the lesson.

What the guards are for: units that are nested, tied or found by themselves; parameters that are frozen,
converted, replaced or updated meanwhile; gradients that are dropped, or that ranks do not all have; second
derivatives; passes that fail; optimizers that hold other parameters, step too early or are not element-wise;
buffers; whole states; deep copies; torch.compile. `compute_dtype` is here, too: the engine has no use for it.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from compare.contract.communication import REPLICATE
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.comm.untraced import untraced
from torchpar.guards.buffers import Buffers
from torchpar.guards.claims import require_unclaimed
from torchpar.guards.elementwise import watch_optimizers
from torchpar.guards.flat_gradients import agree_on_used
from torchpar.guards.flat_parameters import FlatParameters
from torchpar.guards.flat_steps import FlatSteps
from torchpar.guards.full_state import full_state, load_full_state, refuse_pieces_in_state
from torchpar.guards.parts import axes_of
from torchpar.guards.units import Structure, Unit, Units, groups_of, is_opaque, make_units
from torchpar.guards.weak_hooks import weakly
from torchpar.manual import fully_sharded as lesson
from torchpar.manual.fully_sharded import reduce_scatter_gradients, tensors_in
from torchpar.manual.megatron.split import split_layers_of
from torchpar.optimizer import clip_gradients


class FSDP(lesson.FSDP):
    """Shards the parameters, gradients and optimizer state of any module over the ranks of a group.

    Call it as the module itself; after `backward` call `finish_gradient_synchronization()`, then step an
    optimizer over `parameters()`, which are this rank's pieces: 1-D, perhaps empty, under the original
    names. Everything that treats elements one by one works on them (SGD, Adam, ...). A torch Optimizer that
    does not (Adafactor, Muon, LBFGS, ...) is found out by its first step, which raises a ValueError on all
    ranks: see `elementwise`.

        >>> model = FSDP(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        >>> for x in torch.randn(3, 16, 8):
        ...     model(x).square().mean().backward()      # the mean over this rank's share of the batch
        ...     model.finish_gradient_synchronization()  # the mean over all ranks
        ...     norm = model.clip_grad_norm_(1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> {name: tuple(weight.shape) for name, weight in model.full_state_dict().items()}
        {'0.weight': (32, 8), '0.bias': (32,), '2.weight': (8, 32), '2.bias': (8,)}

    Every rank must run the same units in the same order: nobody notices if one gathers another unit than the
    others, and what comes is made of both. So give no units where ranks choose their layers for themselves
    (LayerDrop, experts), but `find_unused_parameters`; without it all use the same parameters. A parameter is
    unsharded only while a module of its unit runs, which means: is called, not by another method. A model
    that reads another layer's weight directly wants both in one unit. Backward must enter a unit through
    what one of its modules returned: a loss kept in an attribute would find the weights freed. After a
    backward with create_graph=True all that it read stays unsharded until
    `finish_gradient_synchronization`. Pieces may be written to at any time, but through `.data`, which
    nothing counts, not between a forward with gradients and the next finish or step. What forward itself
    writes to weights (nn.Embedding's max_norm) is lost with zero=3, where they are freed.

    Args:
        module: tied and frozen parameters, custom layers, mixed dtypes, fewer elements than ranks are fine.
            Its values become those of the first rank.
        units: submodules to gather one after the other, or lists of them that are gathered together; what is
            in none, or tied between two, stays gathered throughout. None: the elements of the outermost
            ModuleLists and Sequentials, through lists and dicts of lists; name layers that are attributes
            or in a ModuleDict yourself. (): everything at once; that is what None is, too, if ranks may use
            others than each other (find_unused_parameters).
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
        replicate_group: ranks that hold the same shard as this one: hybrid sharding.
        zero: 3 shards parameters, gradients and optimizer state, 2 all but the parameters.
        reshard_after_forward: zero 3: free after forward, and gather again in backward.
        compute_dtype: gather and compute in this dtype, floating-point inputs too; shards and gradients stay
            in the parameters' own, and are summed in it. Buffers stay as they are; what they promote is
            cast again where the next unit begins.
        inputs_only: modules of just these types need not be gathered for backward, which does not read
            their weights.
        find_unused_parameters: parameters may be used on some ranks only, and count as zero on the others.
            Costs one small all-reduce a step, and the overlap of reductions with backward: full gradients
            of all units stay in memory until the end.
        broadcast_buffers: see DataParallel.

    Attributes:
        module: with pieces for parameters, except while it runs.
        pieces: by the original names, what an optimizer is to update.
        units: in the order of the argument.

    Raises:
        RuntimeError: from `finish_gradient_synchronization`, if this rank did not use a parameter of which
            it holds a piece, and others did. From an optimizer's `step()`, if it was not called, or if the
            optimizer has the parameters as they were before. From forward, if parameters are others, or
            of another dtype, than when this was made; from backward, if they were updated since forward.
    """

    flats: list[Any]  # `flat_parameters.FlatParameters`, which the lesson knows as its own
    units: list[Any]  # `units.Unit`

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Units | None = None,
        group: Axis | ProcessGroup | None = None,
        replicate_group: Axis | ProcessGroup | None = None,
        zero: Literal[2, 3] = 3,
        reshard_after_forward: bool = True,
        compute_dtype: torch.dtype | None = None,
        inputs_only: tuple[type[nn.Module], ...] = (nn.Embedding,),
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
    ):
        if zero not in (2, 3):
            raise ValueError(f"zero = {zero}: FSDP has 2 and 3; for 1 use ShardedOptimizer")
        require_unclaimed(dict(module.named_parameters()))
        names = {parameter: name for name, parameter in module.named_parameters()}
        # Ranks that choose their layers for themselves would gather half of one and half of another.
        units = () if units is None and find_unused_parameters else units
        super().__init__(
            module,
            units=groups_of(module, units),
            group=group,
            replicate_group=replicate_group,
            zero=zero,
            reshard_after_forward=reshard_after_forward,
            inputs_only=inputs_only,
            compute_dtype=compute_dtype,
        )
        piece_of = self.piece_by_parameter
        self.pieces = {name: piece_of[parameter] for parameter, name in names.items()}
        self._compute_dtype, self._must_agree = compute_dtype, find_unused_parameters
        self._hooked: set[nn.Parameter] = set()
        self._is_backward = self._backward_comes_again = False
        self._shared_buffers = Buffers(module, [self.axis, self.replicas], each_pass=broadcast_buffers)
        self._shared_buffers.broadcast(purpose=REPLICATE)
        self._steps = FlatSteps(self.flats, {n: layer.axis for n, layer in split_layers_of(module).items()})
        refuse_pieces_in_state(module)
        watch_optimizers()
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

    def finish_gradient_synchronization(self) -> None:
        """Wait until every piece has its part of the mean gradient over all ranks, and reshard all units.

        A parameter that took no part in the loss keeps the gradient None, as on one device.
        """
        for flat in self.flats:
            flat.gradients.require_no_hooks()
        super().finish_gradient_synchronization()

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

    def reduce(self, unit: Any) -> None:
        """Begin to reduce a unit's gradients; not before all ranks have agreed on which, if they must."""
        if not self._must_agree:
            super().reduce(unit)

    def reduce_rest(self) -> None:
        """Begin to reduce the remaining units, in the order of backward."""
        if not self._must_agree:
            super().reduce_rest()
            return
        agree_on_used([flat.gradients for flat in self.flats])
        for flat in self.flats:
            reduce_scatter_gradients(flat.gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero; drop also those that are still to be reduced."""
        for flat in self.flats:
            flat.gradients.drop(set_to_none=set_to_none)
        self._reducing = None

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all ranks' pieces. Returns the norm before: a scalar, the same everywhere."""
        for flat in self.flats:
            flat.gradients.require_finished("clip_grad_norm_()")
        return clip_gradients(self.pieces, lambda name: axes_of(self.pieces[name]), max_norm=max_norm)

    @property
    def transient(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers, whose storage comes and goes."""
        return tuple(flat.full for flat in self.flats if not flat.keeps_full)

    @property
    def elements(self) -> dict[str, slice]:
        """Elements of each flattened parameter, (numel,), in this rank's piece, by the original names."""
        own = self.elements_by_parameter
        return {name: own[parameter] for name, parameter in self._parameters_by_name().items()}

    def gather(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full tensors, in the model's shapes, from every rank's pieces (n,), by the original names."""
        by_name = self._parameters_by_name()
        full = self.gather_by_parameter({by_name[name]: piece for name, piece in pieces.items()})
        return {name: full[by_name[name]] for name in pieces}

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict()` of the wrapped module as if it were not sharded, on every rank."""
        weights = self.gather({name: piece.detach() for name, piece in self.pieces.items()})
        return full_state(self.module, self.flats, weights)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `full_state_dict` returned, also on another number of ranks. Nothing, if it does not fit.

        Args:
            state: full tensors, the same on all ranks; the `state_dict()` of the unwrapped module will do.
                What is tied may be there under one of its names, or under all.

        Raises:
            ValueError: a name is missing or unknown, a tensor has another shape, or what is tied differs.
        """
        self.reshard_all()
        load_full_state(self.module, self.flats, state)

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments with floating-point tensors in the dtype to compute in."""
        if self._compute_dtype is None:
            return args, kwargs
        return tree_map(self._cast_one, (args, kwargs))

    def _cast_one(self, value: object) -> object:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._compute_dtype)
        return value

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {name: p for flat in self.flats for name, p in zip(flat.names, flat.parameters, strict=True)}

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

    sharded: FSDP
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
