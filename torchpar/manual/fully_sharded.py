"""Fully sharded data parallelism by hand: every rank keeps a cut of the parameters, gradients and moments.

A unit of the module is unsharded when it begins to run, and resharded when the next one does; meanwhile the
next one's all_gather is under way, so that two are unsharded at a time. In backward the same in reverse, and
as soon as a unit's gradients are all there, they are reduce-scattered: each rank is left with its shard.

    zero=3                             gathered for forward, freed, gathered again for backward (FULL_SHARD)
    zero=3, reshard_after_forward=False    gathered once a step, freed at its end (SHARD_GRAD_OP)
    zero=2                             always in memory, gathered once a step, after the optimizer, and for
                                       each forward without gradients: pieces may have been written to
    replicate_group                    the shards are summed over replicas too (HSDP)

ZeRO-1, which shards only what the optimizer keeps, is `sharded_optimizer.ShardedOptimizer`.
Sources: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277).
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from compare.contract.communication import GRADIENTS, PARAMETERS, RECORD, REPLICATE
from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.comm.untraced import untraced
from torchpar.guards.buffers import Buffers
from torchpar.guards.claims import require_unclaimed
from torchpar.guards.parts import axes_of
from torchpar.manual.megatron.split import split_layers_of
from torchpar.manual.zero.elementwise import watch_optimizers
from torchpar.manual.zero.flat_gradients import FlatGradients
from torchpar.manual.zero.flat_parameters import FlatParameters
from torchpar.manual.zero.flat_steps import FlatSteps
from torchpar.manual.zero.full_state import full_state, load_full_state, refuse_pieces_in_state
from torchpar.manual.zero.reduce_scheduler import ReduceScheduler
from torchpar.manual.zero.units import Structure, Unit, Units, make_units
from torchpar.manual.zero.unshard_scheduler import UnshardScheduler
from torchpar.optimizer import clip_gradients


def shard_parameters(module: nn.Module, units: Units | None, axis: Axis, **options: Any) -> list[Unit]:
    """Cut a module's parameters over the ranks: each keeps its shard of the flat buffers of every unit.

    Args:
        module: any; it then shows this rank's pieces of its parameters, and not the parameters.
        units: what is unsharded together: see `FSDP`.
        axis: the ranks.
        options: as for `FlatParameters`.
    """
    sharded = make_units(module, units, axis, **options)
    for unit in sharded:
        unit.show_pieces()
        for flat in unit.flats:
            reshard(flat)
    return sharded


@torch.no_grad()
def unshard(flat: FlatParameters) -> None:
    """Begin to gather the parameters from the shards of all ranks; `flat.wait_unshard()` waits for them."""
    if flat.begin_unshard():
        if not flat.keeps_full:
            flat.full.untyped_storage().resize_(flat.full.nbytes)
            flat.own.copy_(flat.shard)
        flat.work = flat.axis.start_all_gather(flat.full, flat.own, purpose=PARAMETERS)


def reshard(flat: FlatParameters) -> None:
    """Free the parameters: only this rank's shard stays, unless the buffer is kept."""
    flat.wait_unshard()
    flat.is_unsharded = False
    if not flat.keeps_full:
        # The tensor stays, without memory: autograd saved views of this storage for backward, and they are
        # valid again once it has been gathered again.
        flat.full.untyped_storage().resize_(0)


@torch.no_grad()
def reduce_scatter_gradients(gradients: FlatGradients, used: Sequence[bool] | None = None) -> None:
    """Begin to sum the gradients over the ranks, each of which gets its shard of the sum.

    Args:
        gradients: full ones, of this rank's share of the batch.
        used: see `FlatGradients.to_reduce`.
    """
    if indices := gradients.to_reduce(used):
        finish_mean(gradients)  # of a backward before, if it is still under way
        shard, full = gradients.begin_reduction(indices)
        gradients.work = gradients.axis.start_reduce_scatter(shard, full, purpose=GRADIENTS)


@torch.no_grad()
def all_reduce_over_replicas(gradients: FlatGradients) -> None:
    """Wait for the shard's sum, free the full gradients, and begin the sum over the replicas (HSDP)."""
    shard = gradients.wait_reduce_scatter()
    if shard is not None and gradients.replicas and gradients.replicas.size > 1:
        gradients.work = gradients.replicas.start_all_reduce(shard, purpose=GRADIENTS)


@torch.no_grad()
def finish_mean(gradients: FlatGradients) -> None:
    """Leave each parameter's piece its part of the mean over all ranks."""
    all_reduce_over_replicas(gradients)
    shard = gradients.wait()
    if shard is not None:
        shard /= gradients.ranks
    gradients.hand_out()


def gather_full(flat: FlatParameters, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Full tensors in the parameters' shapes from every rank's pieces of them: for the record."""
    shard = torch.cat([piece.reshape(-1) for piece in pieces])
    full = shard.new_empty(flat.layout.numel)
    flat.axis.all_gather(full, shard, purpose=RECORD)
    return flat.layout.views(full)


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
    `find_unused_parameters`. A parameter is unsharded only while a module of its unit runs, which means: is
    called, not by another method. A model that reads another layer's weight directly wants both in one
    unit. Backward must enter a unit through what one of its modules returned: a loss kept in an attribute
    would find the weights freed. After a backward with create_graph=True all that it read stays unsharded
    until `finish_gradient_synchronization`. Pieces may be written to at any time, but through `.data`, which
    nothing counts, not between a forward with gradients and the next finish or step.

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
        require_unclaimed(dict(module.named_parameters()))
        options = {"replicas": self.replicas, "keeps_full": zero == 2, "compute_dtype": compute_dtype}
        shared = Buffers(module, [self.axis, self.replicas], each_pass=broadcast_buffers)
        shared.broadcast(purpose=REPLICATE)
        self._shared_buffers = shared
        parts = {name: layer.axis for name, layer in split_layers_of(module).items()}
        # Ranks that choose their layers for themselves would gather half of one and half of another.
        units = () if units is None and find_unused_parameters else units
        self.units = shard_parameters(module, units, self.axis, **options)
        self._flats = [flat for unit in reversed(self.units) for flat in unit.flats]  # as backward comes
        by_name = {name: p for flat in self._flats for name, p in zip(flat.names, flat.pieces, strict=True)}
        self.pieces = {name: by_name[name] for name, _ in module.named_parameters()}
        self._reductions = ReduceScheduler(
            self.units,
            reduce_scatter=reduce_scatter_gradients,
            all_reduce=all_reduce_over_replicas,
            must_agree=find_unused_parameters,
        )
        self._unsharding = UnshardScheduler(
            self.units,
            unshard=unshard,
            reshard=reshard,
            reshards=zero == 3 and reshard_after_forward,
            inputs_only=inputs_only,
            compute_dtype=compute_dtype,
            on_unshard=self._reductions.watch,
            are_awaited=self._reductions.are_awaited,
        )
        self._steps = FlatSteps(self._flats, parts)
        refuse_pieces_in_state(module)
        watch_optimizers()
        self._structure = Structure(module)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: at rest. What is cut comes first, so that modules and hooks find copied pieces."""
        for flat in self._flats:
            flat.keep_memory("pieces")
        return {"_flats": self._flats, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the copy."""
        super().__setstate__(state)
        for unit in self.units:
            self._unsharding.reshard_unit(unit)

    @property
    def transient(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers, whose storage comes and goes."""
        return tuple(flat.full for unit in self.units for flat in unit.flats if not flat.keeps_full)

    @property
    def elements(self) -> dict[str, slice]:
        """Which elements of each parameter this rank's piece is, by the original names."""
        return {
            name: own for flat in self._flats for name, own in zip(flat.names, flat.elements, strict=True)
        }

    def forward(self, *args, **kwargs):
        """The module's own."""
        args, kwargs = self._begin_pass(args, kwargs)
        try:
            return self.module(*args, **kwargs)
        finally:
            self._unsharding.end_pass()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Only accumulate: put it around forward and backward of every pass of a step but the last.

        The unreduced gradients of all units stay in memory meanwhile.
        """
        before, self._reductions.is_synchronizing = self._reductions.is_synchronizing, False
        try:
            yield
        finally:
            self._reductions.is_synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """Wait until every piece has its part of the mean gradient over all ranks, and reshard all units.

        A parameter that took no part in the loss keeps the gradient None, as on one device.
        """
        for flat in self._flats:
            flat.gradients.require_no_hooks()
        self._reductions.reduce_all()
        for flat in self._flats:
            finish_mean(flat.gradients)
        self._reductions.reset()
        self._unsharding.reshard_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero; drop also those that are still to be reduced."""
        for unit in self.units:
            unit.begin_pass()
        for flat in self._flats:
            flat.gradients.drop(set_to_none=set_to_none)
        self._reductions.reset()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all ranks' pieces. Returns the norm before: a scalar, the same everywhere."""
        for flat in self._flats:
            flat.gradients.require_finished("clip_grad_norm_()")
        return clip_gradients(self.pieces, lambda name: axes_of(self.pieces[name]), max_norm=max_norm)

    def gather(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full tensors from every rank's pieces: weights, gradients or moments by the original names."""
        full: dict[str, torch.Tensor] = {}
        for flat in self._flats:
            full.update(zip(flat.names, gather_full(flat, [pieces[n] for n in flat.names]), strict=True))
        return {name: full[name] for name in pieces}

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict()` of the wrapped module as if it were not sharded, on every rank."""
        weights = self.gather({name: piece.detach() for name, piece in self.pieces.items()})
        return full_state(self.module, self._flats, weights)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `full_state_dict` returned, also on another number of ranks. Nothing, if it does not fit.

        Args:
            state: full tensors, the same on all ranks; the `state_dict()` of the unwrapped module will do.
                What is tied may be there under one of its names, or under all.

        Raises:
            ValueError: a name is missing or unknown, a tensor has another shape, or what is tied differs.
        """
        self._unsharding.reshard_all()
        load_full_state(self.module, self._flats, state)

    @untraced
    def _begin_pass(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self._shared_buffers.before_forward(synchronizing=self._reductions.is_synchronizing)
        self._steps.before_forward()
        self._unsharding.begin_pass()
        for unit in self.units:
            unit.begin_pass()
        self._structure.require_same()
        return self._unsharding.cast(args, kwargs)
