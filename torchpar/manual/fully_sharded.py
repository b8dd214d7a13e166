"""Fully sharded data parallelism by hand: every rank keeps a cut of the parameters, gradients and moments.

A unit of the module is gathered when it begins to run, and freed when the next one does; meanwhile the next
one's gather is under way, so that two are whole at a time. In backward the same in reverse, and as soon as a
unit's gradients are all there, their sum over the ranks is scattered: each rank is left with its cut.

    zero=3                             gathered for forward, freed, gathered again for backward (FULL_SHARD)
    zero=3, reshard_after_forward=False    gathered once a step, freed at its end (SHARD_GRAD_OP)
    zero=2                             always in memory, gathered once a step, after the optimizer
    replicate_group                    the shards are summed over replicas too (HSDP)

ZeRO-1, which shards only what the optimizer keeps, is `sharded_optimizer.ShardedOptimizer`.
Sources: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277).
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from compare.contract.communication import REPLICATE
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.manual.any_module.buffers import Buffers
from torchpar.manual.any_module.claims import require_unclaimed
from torchpar.manual.any_module.untraced import untraced
from torchpar.manual.zero.elementwise import watch_optimizers
from torchpar.manual.zero.flat_gradients import agree_on_use
from torchpar.manual.zero.flat_parameters import Flat
from torchpar.manual.zero.flat_steps import FlatSteps
from torchpar.manual.zero.full_state import full_state, load_full_state
from torchpar.manual.zero.units import Structure, Unit, Units, make_units
from torchpar.manual.zero.unshard import Gathers
from torchpar.optimizer import clip_gradients


class FSDP(nn.Module):
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

    Every rank must run the same units in the same order, and use the same parameters, but for
    `find_unused_parameters`. A parameter is whole only while a module of its unit runs, which means: is
    called, not by another method. A model that reads another layer's weight directly wants both in one
    unit. Backward must enter a unit through what one of its modules returned: a loss kept in an attribute
    would find the weights freed. After a backward with create_graph=True all that it read stays whole until
    `finish_gradient_synchronization`. Pieces may be written to at any time, but through `.data`, which
    nothing counts, not between a forward with gradients and the next finish or step.

    Args:
        module: tied and frozen parameters, custom layers, mixed dtypes, fewer elements than ranks are fine.
            Its values become those of the first rank.
        units: submodules to gather one after the other, or lists of them that are gathered together; what is
            in none, or tied between two, stays gathered throughout. None: the elements of the outermost
            ModuleLists and Sequentials, through lists and dicts of lists; name layers that are attributes
            or in a ModuleDict yourself. (): everything at once.
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
            Costs one small all-reduce a step, and the overlap of reductions with backward: whole gradients
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
        super().__init__()
        if zero not in (2, 3):
            raise ValueError(f"zero = {zero}: FSDP has 2 and 3; for 1 use ShardedOptimizer")
        self.module = module
        self.axis = Axis.of(group)
        self.replicas = None if replicate_group is None else Axis.of(replicate_group)
        self._find_unused = find_unused_parameters
        self._synchronizing = True
        require_unclaimed(dict(module.named_parameters()))
        options = {"replicas": self.replicas, "keeps_full": zero == 2, "compute_dtype": compute_dtype}
        shared = Buffers(module, [self.axis, self.replicas], each_pass=broadcast_buffers)
        shared.broadcast(purpose=REPLICATE)
        self._shared_buffers = shared
        self.units = make_units(module, units, self.axis, **options)
        self._flats = [flat for unit in reversed(self.units) for flat in unit.flats]  # as backward comes
        by_name = {name: p for flat in self._flats for name, p in zip(flat.names, flat.pieces, strict=True)}
        self.pieces = {name: by_name[name] for name, _ in module.named_parameters()}
        self._launched: Unit | None = None
        self._hooked: set[nn.Parameter] = set()
        self._gathers = Gathers(
            self.units,
            reshards=zero == 3 and reshard_after_forward,
            inputs_only=inputs_only,
            compute_dtype=compute_dtype,
            on_whole=self._watch,
            are_awaited=self._are_gradients_awaited,
        )
        self._steps = FlatSteps(self._flats)
        watch_optimizers()
        self._structure = Structure(module)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: at rest. What is cut comes first, so that modules and hooks find copied pieces."""
        for flat in self._flats:
            flat.keep_memory("pieces")
        at_rest = {"_synchronizing": True, "_launched": None, "_hooked": set()}
        return {"_flats": self._flats, **super().__getstate__(), **at_rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the copy."""
        super().__setstate__(state)
        for unit in self.units:
            unit.free()

    @property
    def transient(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers, whose storage comes and goes."""
        return tuple(flat.full for unit in self.units for flat in unit.flats if not flat.keeps_full)

    def forward(self, *args, **kwargs):
        """The module's own."""
        args, kwargs = self._begin_pass(args, kwargs)
        try:
            return self.module(*args, **kwargs)
        finally:
            self._gathers.end_pass()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Only accumulate: put it around forward and backward of every pass of a step but the last.

        The unreduced gradients of all units stay in memory meanwhile.
        """
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """Wait until every piece has its part of the mean gradient over all ranks; free what is gathered.

        A parameter that took no part in the loss keeps the gradient None, as on one device.
        """
        if self._find_unused:
            all_gradients = [flat.gradients for flat in self._flats]
            for gradients, used in zip(all_gradients, agree_on_use(all_gradients), strict=True):
                gradients.start_reduction(used)
        else:
            for unit in reversed(self.units):
                self._launch(unit)
        for flat in self._flats:
            flat.gradients.finish_reduction()
        self._launched = None
        self._gathers.free_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero; drop also those that are still to be reduced."""
        for unit in self.units:
            unit.begin_pass()
        for flat in self._flats:
            flat.gradients.drop(set_to_none=set_to_none)
        self._launched = None

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all ranks' pieces. Returns the norm before: a scalar, the same everywhere."""
        for flat in self._flats:
            flat.gradients.require_finished("clip_grad_norm_()")
        return clip_gradients(self.pieces, lambda name: (self.axis,), max_norm=max_norm)

    def gather(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors from every rank's pieces: weights, gradients or moments by the original names."""
        whole: dict[str, torch.Tensor] = {}
        for flat in self._flats:
            whole.update(zip(flat.names, flat.gather([pieces[n] for n in flat.names]), strict=True))
        return {name: whole[name] for name in pieces}

    def full_state_dict(self) -> dict[str, Any]:
        """What the wrapped module's `state_dict()` would be if it were not sharded, on every rank."""
        weights = self.gather({name: piece.detach() for name, piece in self.pieces.items()})
        return full_state(self.module, self._flats, weights)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `full_state_dict` returned, also on another number of ranks. Nothing, if it does not fit.

        Args:
            state: whole tensors, the same on all ranks; the `state_dict()` of the unwrapped module will do.
                What is tied may be there under one of its names, or under all.

        Raises:
            ValueError: a name is missing or unknown, a tensor has another shape, or what is tied differs.
        """
        self._gathers.free_all()
        load_full_state(self.module, self._flats, state)

    @untraced
    def _begin_pass(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self._shared_buffers.before_forward(synchronizing=self._synchronizing)
        self._steps.before_forward()
        self._gathers.begin_pass()
        for unit in self.units:
            unit.begin_pass()
        self._structure.require_same()
        return self._gathers.cast(args, kwargs)

    def _are_gradients_awaited(self) -> bool:
        return not self._synchronizing or any(flat.gradients.is_awaited for flat in self._flats)

    def _watch(self, unit: Unit) -> None:
        """Have the gradients of a unit's parameters taken in; also of one that was frozen before."""
        for flat in unit.flats:
            for place, parameter in enumerate(flat.parameters):
                if parameter.requires_grad and parameter not in self._hooked:
                    self._hooked.add(parameter)
                    parameter.register_post_accumulate_grad_hook(self._make_take(unit, flat, place))

    def _make_take(self, unit: Unit, flat: Flat, place: int):
        @untraced
        def take_gradient(parameter: torch.Tensor) -> None:
            if unit.add_gradient(flat, place) and self._synchronizing and not self._find_unused:
                self._launch(unit)

        return take_gradient

    def _launch(self, unit: Unit) -> None:
        """Begin to reduce a unit, and settle the one before: at most two hold whole gradients."""
        if self._launched:
            for flat in self._launched.flats:
                flat.gradients.settle()
        for flat in unit.flats:
            flat.gradients.start_reduction()
        self._launched = unit
