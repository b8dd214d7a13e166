"""Fully sharded data parallelism by hand: every rank keeps a cut of the parameters, gradients and moments.

A unit of the module is unsharded when it begins to run, and resharded when the next one does; meanwhile the
next one's all_gather is under way, so that two are unsharded at a time. In backward the same in reverse, and
as soon as a unit's gradients are all there, they are reduce-scattered: each rank is left with its shard.

    zero=3                             gathered for forward, freed, gathered again for backward (FULL_SHARD)
    zero=3, reshard_after_forward=False    gathered once a step, freed at its end (SHARD_GRAD_OP)
    zero=2                             always in memory, gathered once a step, after the optimizer, and for
                                       each forward without gradients: pieces may have been written to
    replicas > 1                       the shards are summed over replicas too (HSDP)

WHAT moves are the functions, of the memory in `flat_parameters`; WHEN are the methods of `FSDP`, in the order
in which they run. ZeRO-1, which shards only what the optimizer keeps, is `sharded_optimizer`.
Sources: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from compare.contract.communication import GRADIENTS, PARAMETERS
from torchpar.comm.collectives import Axis
from torchpar.manual.flat import Accumulates, pack
from torchpar.manual.flat_parameters import FlatGradients, FlatParameters, Unit


@torch.no_grad()
def unshard(flat: FlatParameters) -> None:
    """Begin to gather the parameters from the shards of all ranks; `flat.wait_unshard()` waits for them."""
    if not flat.is_unsharded and flat.work is None:
        if flat.zero == 3:
            flat.full.untyped_storage().resize_(flat.full.nbytes)
            flat.full[flat.own] = flat.shard
        flat.work = flat.axis.start_all_gather(flat.full, flat.full[flat.own], purpose=PARAMETERS)


@torch.no_grad()
def reduce_scatter_gradients(gradients: FlatGradients) -> None:
    """Begin to sum full gradients over the ranks, each of which gets its shard of the sum."""
    if gradients.full is not None and gradients.shard is None:
        flat, own = gradients.flat, gradients.full[gradients.flat.own]
        gradients.shard = own if flat.zero == 1 else torch.empty_like(own)
        gradients.work = flat.axis.start_reduce_scatter(gradients.shard, gradients.full, purpose=GRADIENTS)


@torch.no_grad()
def all_reduce_over_replicas(gradients: FlatGradients) -> None:
    """Wait for the shard's sum, free the full gradients, and begin the sum over the replicas (HSDP)."""
    if gradients.full is not None and gradients.shard is not None:
        gradients.wait()
        gradients.full, replicas = None, gradients.flat.replicas
        if replicas.size > 1:
            gradients.work = replicas.start_all_reduce(gradients.shard, purpose=GRADIENTS)


@torch.no_grad()
def finish_mean(gradients: FlatGradients) -> None:
    """Finish the reduction: each piece gets its slice of the mean over all ranks."""
    all_reduce_over_replicas(gradients)
    gradients.wait()
    gradients.hand_out()


class FSDP(Accumulates, nn.Module):
    """Shards the parameters, gradients and optimizer state of a module over the ranks of a group.

    Call it as the module itself; after `backward` call `finish_gradient_synchronization()`, then step an
    optimizer that treats elements one by one over the pieces (`pieces_of(fsdp.flats)`). Every rank runs the
    same units in the same order, and uses every parameter.

    Args:
        module: its values become those of the first rank. It then shows pieces, except while it runs.
        units: lists of submodules that are gathered together; each parameter is in one list alone. The module
            itself may be the last, for what is left: it stays gathered to the end of a step.
        axis: the ranks; `replicas`: those with the same shard.
        zero: 3 shards parameters, gradients and optimizer state, 2 all but the parameters.
        reshard_after_forward: zero 3: free after forward, and gather again in backward.
        inputs_only: backward does not read the weights of modules of just these types.
        fill: gives the modules of a unit their values, just before they are cut.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Sequence[Sequence[nn.Module]],
        axis: Axis,
        replicas: Axis,
        zero: int,
        reshard_after_forward: bool,
        inputs_only: tuple[type[nn.Module], ...],
        fill: Callable[[Sequence[nn.Module]], None],
    ):
        super().__init__()
        self.module, self.axis, self._inputs_only = module, axis, inputs_only
        named, self.units = list(module.named_parameters()), list[Unit]()
        for modules in units:
            fill(modules)
            inside = {parameter for part in modules for parameter in part.parameters()}
            members = [pair for pair in named if pair[1] in inside]
            named = [pair for pair in named if pair[1] not in inside]
            packs = pack(members, limit_bytes=float("inf"))  # experts apart: fewer ranks have them
            flats = [FlatParameters(some, axis, zero=zero, replicas=replicas) for some in packs]
            stays = zero == 2 or not reshard_after_forward or module in modules
            self.units.append(Unit(modules, flats, stays=stays))
        # In the order in which backward comes to them.
        self.flats = [flat for unit in reversed(self.units) for flat in unit.flats]
        self._visits, self._visits_before = list[Unit](), list[Unit]()  # of this pass, and of one like it
        self._read = list[Unit]()  # of this pass, those whose weights backward reads again
        self._unsharded = list[Unit]()  # the current one, and those that stay or are gathered ahead
        self._current = self._reducing = None
        for unit in self.units:
            for part in unit.modules:
                part.register_forward_pre_hook(partial(self.before_forward, unit), prepend=True)
                part.register_forward_hook(partial(self.after_forward, unit))
            for flat in unit.flats:
                flat.on_gradients(partial(self.gradient_ready, unit, flat))

    def forward(self, *args, **kwargs):
        self._current = None
        self._visits_before, self._visits = self._visits or self._visits_before, []
        self._read.clear()
        output = self.module(*args, **kwargs)
        self._current = None
        if not torch.is_grad_enabled():  # nothing stays gathered for a backward
            self.reshard_all()
        return output

    def before_forward(self, unit: Unit, module: nn.Module, args: tuple) -> None:
        if unit is not self._current:
            self._visits.append(unit)
            self.enter(unit, self._visits_before[len(self._visits) :])

    def after_forward(self, unit: Unit, module: nn.Module, args: tuple, output: object) -> None:
        """A module of the unit has run: backward will come through what it returned."""
        if unit.stays or not torch.is_grad_enabled() or type(module) in self._inputs_only:
            return
        for tensor in (x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad):
            tensor.register_hook(lambda gradient: self.before_backward(unit))
        if self._read[-1:] != [unit]:
            self._read.append(unit)

    def before_backward(self, unit: Unit) -> None:
        """Backward is about to enter the unit: the gradient of an output is there."""
        order = self._read[::-1]
        self.enter(unit, order[order.index(unit) + 1 :] if unit in order else ())

    def enter(self, unit: Unit, upcoming: Sequence[Unit]) -> None:
        """Unshard a unit, reshard those that are not running, and begin to unshard the first one to come."""
        if unit is not self._current:
            self._current = unit
            for other in [u for u in self._unsharded if u is not unit and not u.stays]:
                self._unsharded.remove(other)
                other.reshard()
            self.begin_unshard(unit)
            unit.wait_unshard()
        if upcoming:
            self.begin_unshard(upcoming[0])

    def begin_unshard(self, unit: Unit) -> None:
        if unit not in self._unsharded:
            self._unsharded.append(unit)
            for flat in unit.flats:
                unshard(flat)

    def gradient_ready(self, unit: Unit, flat: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        """Backward has left a parameter's gradient; with the unit's last one, all of them leave."""
        flat.gradients.add(index)
        if self.is_synchronizing:
            flat.gradients.ready.add(index)
            if all(flat.gradients.is_full for flat in unit.flats):
                self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        for flat in self._reducing.flats if self._reducing else ():  # at most two units hold full ones
            all_reduce_over_replicas(flat.gradients)
        for flat in unit.flats:
            reduce_scatter_gradients(flat.gradients)
        self._reducing = unit

    def finish_gradient_synchronization(self) -> None:
        """Wait until every piece has its part of the mean gradient over all ranks, and reshard all units."""
        for unit in reversed(self.units):  # what backward left, in its order
            self.reduce(unit)
        for flat in self.flats:
            finish_mean(flat.gradients)
        self._reducing = None
        self.reshard_all()

    def reshard_all(self) -> None:
        for unit in self._unsharded:
            unit.reshard()
        self._unsharded, self._current = [], None
