"""Fully sharded data parallelism by hand: every rank keeps a cut of the parameters, gradients and moments.

A unit of the module is unsharded when it begins to run, and resharded when the next one does; meanwhile the
next one's all_gather is under way, so that two are unsharded at a time. In backward the same in reverse, and
as soon as a unit's gradients are all there, they are reduce-scattered: each rank is left with its shard.

    zero=3                             gathered for forward, freed, gathered again for backward (FULL_SHARD)
    zero=3, reshard_after_forward=False    gathered once a step, freed at its end (SHARD_GRAD_OP)
    zero=2                             always in memory, gathered once a step, after the optimizer, and for
                                       each forward without gradients: pieces may have been written to
    replicate_group                    the shards are summed over replicas too (HSDP)

WHAT moves are the functions from `shard_parameters` on, WHEN are the methods of `FSDP`, in the order in which
they run. The engine runs this class; `torchpar.FSDP` is the same with guards, for any module. ZeRO-1, which
shards only what the optimizer keeps, is `sharded_optimizer.ShardedOptimizer`.
Sources: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from compare.contract.communication import GRADIENTS, PARAMETERS
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.manual.accumulation import Accumulates
from torchpar.manual.zero.flat_gradients import FlatGradients
from torchpar.manual.zero.flat_parameters import FlatParameters, Unit, flatten_parameters
from torchpar.pieces import HoldsPieces


def shard_parameters(
    module: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    axis: Axis,
    *,
    fill: Callable[[Sequence[nn.Module]], None] = lambda modules: None,
    **options: Any,
) -> list[Unit]:
    """Cut a module's parameters over the ranks: each keeps its shard of the flat buffers of every unit.

    Args:
        module: any; it then shows this rank's pieces of its parameters, and not the parameters.
        units: lists of submodules that are unsharded together; each parameter is in one of them alone.
        axis: the ranks.
        fill: gives a unit's parameters their values, just before they are cut.
        options: as for `FlatParameters`.
    """
    whole, sharded = list(module.named_parameters()), []
    for modules in units:
        own = {parameter for one in modules for parameter in one.parameters()}
        named = [(name, parameter) for name, parameter in whole if parameter in own]
        fill(modules)
        sharded.append(Unit(modules, flatten_parameters(named, axis, **options)))
        reshard_unit(sharded[-1])
    return sharded


@torch.no_grad()
def unshard(flat: FlatParameters) -> None:
    """Begin to gather the parameters from the shards of all ranks; `flat.wait_unshard()` waits for them."""
    if flat.begin_unshard():
        if not flat.keeps_full:
            flat.full.untyped_storage().resize_(flat.full.nbytes)
            flat.full[flat.layout.own] = flat.shard
        own = flat.full[flat.layout.own]
        flat.work = flat.axis.start_all_gather(flat.full, own, purpose=PARAMETERS)


def reshard(flat: FlatParameters) -> None:
    """Free the parameters: only this rank's shard stays, unless the buffer is kept."""
    flat.wait_unshard()
    flat.is_unsharded = False
    if not flat.keeps_full:
        # The tensor stays, without memory: autograd saved views of this storage for backward, and they are
        # valid again once it has been gathered again.
        flat.full.untyped_storage().resize_(0)


def reshard_unit(unit: Unit) -> None:
    """Free the parameters of a unit, whose modules then have this rank's pieces."""
    unit.show_pieces()
    for flat in unit.flats:
        reshard(flat)


@torch.no_grad()
def reduce_scatter_gradients(gradients: FlatGradients) -> None:
    """Begin to sum the gradients over the ranks, each of which gets its shard of the sum.

    Args:
        gradients: full ones, of this rank's share of the batch; nothing is sent if there are none.
    """
    if gradients.are_there:
        finish_mean(gradients)  # of a backward before, if it is still under way
        shard, full = gradients.begin_reduction()
        gradients.work = gradients.axis.start_reduce_scatter(shard, full, purpose=GRADIENTS)


@torch.no_grad()
def all_reduce_over_replicas(gradients: FlatGradients) -> None:
    """Wait for the shard's sum, free the full gradients, and begin the sum over the replicas (HSDP)."""
    if gradients.full is not None and gradients.shard is not None:
        gradients.wait()
        gradients.full = None
        if gradients.replicas and gradients.replicas.size > 1:
            gradients.work = gradients.replicas.start_all_reduce(gradients.shard, purpose=GRADIENTS)


@torch.no_grad()
def finish_mean(gradients: FlatGradients) -> None:
    """Finish the reduction: each piece gets its slice of the mean over all ranks."""
    all_reduce_over_replicas(gradients)
    gradients.wait()
    if gradients.shard is not None:
        gradients.shard /= gradients.ranks
    gradients.hand_out()


class FSDP(Accumulates, HoldsPieces, nn.Module):
    """Shards the parameters, gradients and optimizer state of a module over the ranks of a group.

    Call it as the module itself; after `backward` call `finish_gradient_synchronization()`, then step an
    optimizer that treats elements one by one over the pieces (`piece_by_parameter`). Every rank runs the same
    units in the same order, and uses every parameter. A module of a unit is called, and returns what backward
    enters it by.

    Args:
        module: its values become those of the first rank.
        units: lists of submodules that are gathered together, none inside of another's; each parameter is in
            one list alone.
        group: the ranks: an Axis, a torch ProcessGroup, or None for all.
        replicate_group: ranks that hold the same shard as this one: hybrid sharding.
        zero: 3 shards parameters, gradients and optimizer state, 2 all but the parameters.
        reshard_after_forward: zero 3: free after forward, and gather again in backward.
        inputs_only: modules of just these types need not be gathered for backward, which does not read
            their weights.
        options: for `shard_parameters`.

    Attributes:
        module: with pieces for parameters, except while it runs.
        units: in the order of the argument.
        flats: of all units, in the order in which backward comes to them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Sequence[Sequence[nn.Module]],
        group: Axis | ProcessGroup | None = None,
        replicate_group: Axis | ProcessGroup | None = None,
        zero: Literal[2, 3] = 3,
        reshard_after_forward: bool = True,
        inputs_only: tuple[type[nn.Module], ...] = (nn.Embedding,),
        **options: Any,
    ):
        super().__init__()
        self.module, self.axis = module, Axis.of(group)
        self.replicas = None if replicate_group is None else Axis.of(replicate_group)
        self.units = self.make_units(units, replicas=self.replicas, keeps_full=zero == 2, **options)
        self.flats = [flat for unit in reversed(self.units) for flat in unit.flats]
        self._reshards, self._inputs_only = zero == 3 and reshard_after_forward, inputs_only
        self._visits: list[tuple[Unit, bool]] = []  # of this pass: which unit, and whether backward reads it
        self._visits_before: list[tuple[Unit, bool]] = []  # of the pass before, which this one will be like
        self._current: Unit | None = None
        self._unsharded: list[Unit] = []  # the current one, and those that are kept or gathered ahead
        self._reducing: Unit | None = None
        for unit in self.units:
            self.attach(unit)

    def make_units(self, units: Sequence[Sequence[nn.Module]], **options: Any) -> Sequence[Unit]:
        """Cut the parameters: see `shard_parameters`."""
        return shard_parameters(self.module, units, self.axis, **options)

    def attach(self, unit: Unit) -> None:
        """Ask to be told when a module of the unit runs, and when a parameter of it has its gradient."""
        for module in unit.modules:
            module.register_forward_pre_hook(lambda module, args: self.before_forward(unit), prepend=True)
            module.register_forward_hook(partial(self.after_forward, unit))
        for flat in unit.flats:
            flat.on_gradients(partial(self.gradient_ready, unit, flat))

    def forward(self, *args, **kwargs):
        """The module's own."""
        self.begin_pass()
        output = self.module(*args, **kwargs)
        self._current = None
        if not torch.is_grad_enabled():  # nothing stays gathered for a backward
            self.reshard_all()
        return output

    def begin_pass(self) -> None:
        """A forward begins; units will follow each other as in the one before."""
        self._current = None
        self._visits_before, self._visits = self._visits or self._visits_before, []

    def before_forward(self, unit: Unit) -> None:
        """A module of the unit is about to run."""
        if not self.is_current(unit):
            self._visits.append((unit, False))
            self.enter(unit, self._visits_before[len(self._visits) :])

    def after_forward(self, unit: Unit, module: nn.Module, args: tuple, output: object) -> None:
        """A module of the unit has run: backward will come through what it returned."""
        # Not isinstance: a class made from one of these may have other weights, which backward reads.
        if type(module) not in self._inputs_only and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                tensor.register_hook(lambda gradient: self.before_backward(unit))
            self._visits[-1] = (unit, True)

    def before_backward(self, unit: Unit) -> None:
        """Backward is about to enter the unit: the gradient of an output is there."""
        order = [visit for visit in reversed(self._visits) if visit[1]]
        index = next((i for i, (visited, _) in enumerate(order) if visited is unit), len(order))
        self.enter(unit, order[index + 1 :])

    def gradient_ready(self, unit: Unit, flat: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        """Backward has left a parameter's gradient; with the unit's last one, all of them leave."""
        flat.gradients.add(index)
        if self.is_synchronizing:
            flat.gradients.ready.add(index)
            if all(flat.gradients.is_full for flat in unit.flats):
                self.reduce(unit)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every piece has its part of the mean gradient over all ranks, and reshard all units."""
        self.reduce_rest()
        for flat in self.flats:
            finish_mean(flat.gradients)
        self._reducing = None
        self.reshard_all()

    def enter(self, unit: Unit, upcoming: Sequence[tuple[Unit, bool]]) -> None:
        """Unshard a unit, reshard those that are not running, and begin to unshard the first one to come."""
        if not self.is_current(unit):
            self.make_current(unit)
            self.unshard_unit(unit)
            unit.wait_unshard()
        for following, _ in upcoming[:1]:
            self.unshard_unit(following)

    def is_current(self, unit: Unit) -> bool:
        """Whether the unit has been entered last: its parameters are there."""
        return unit is self._current

    def make_current(self, unit: Unit) -> None:
        """Leave the current unit for another one; the others are freed, unless they are kept."""
        self._current = unit
        for other in [other for other in self._unsharded if other is not unit and self.may_reshard(other)]:
            self._unsharded.remove(other)
            reshard_unit(other)

    def may_reshard(self, unit: Unit) -> bool:
        """Whether the parameters of a unit that is not running are freed before the step ends."""
        return self._reshards

    def unshard_unit(self, unit: Unit) -> None:
        """Begin to gather a unit's parameters, if they are not there."""
        if unit not in self._unsharded:
            self._unsharded.append(unit)
            for flat in unit.flats:
                unshard(flat)

    def reshard_all(self) -> None:
        """Free all parameters."""
        for unit in self._unsharded:
            reshard_unit(unit)
        self._unsharded, self._current = [], None

    def reduce(self, unit: Unit) -> None:
        """Begin to reduce a unit's gradients; at most two units hold full ones."""
        if self._reducing:
            for flat in self._reducing.flats:
                all_reduce_over_replicas(flat.gradients)
        for flat in unit.flats:
            reduce_scatter_gradients(flat.gradients)
        self._reducing = unit

    def reduce_rest(self) -> None:
        """Begin to reduce the remaining units, in the order of backward."""
        for unit in reversed(self.units):
            self.reduce(unit)


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors, any shapes, of a module's output that backward goes through."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
