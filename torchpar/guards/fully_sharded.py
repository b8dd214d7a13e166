"""`FSDP` for any module, guarded: `manual.fully_sharded` is the lesson, `guarded_passes` guards its passes.

Guards: parameters that are tied or frozen; gradients that are dropped, or that ranks do not all have;
optimizers that hold other parameters, step too early or are not element-wise; whole states.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from torchpar.comm.collectives import Axis, ProcessGroup
from torchpar.guards.claims import require_unclaimed
from torchpar.guards.elementwise import watch_optimizers
from torchpar.guards.flat_gradients import agree_on_used
from torchpar.guards.full_state import full_state, load_full_state, refuse_pieces_in_state
from torchpar.guards.guarded_passes import GuardedPasses
from torchpar.guards.parts import axes_of
from torchpar.guards.units import Units
from torchpar.manual.fully_sharded import reduce_scatter_gradients
from torchpar.optimizer import clip_gradients


class FSDP(GuardedPasses):
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
            units=units,
            group=group,
            replicate_group=replicate_group,
            zero=zero,
            reshard_after_forward=reshard_after_forward,
            inputs_only=inputs_only,
            compute_dtype=compute_dtype,
            broadcast_buffers=broadcast_buffers,
        )
        piece_of = self.piece_by_parameter
        self.pieces = {name: piece_of[parameter] for parameter, name in names.items()}
        self._must_agree = find_unused_parameters
        refuse_pieces_in_state(module)
        watch_optimizers()

    def finish_gradient_synchronization(self) -> None:
        """Wait until every piece has its part of the mean gradient over all ranks, and reshard all units.

        A parameter that took no part in the loss keeps the gradient None, as on one device.
        """
        for flat in self.flats:
            flat.gradients.require_no_hooks()
        super().finish_gradient_synchronization()

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

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {name: p for flat in self.flats for name, p in zip(flat.names, flat.parameters, strict=True)}
