"""Fully sharded data parallelism by hand: each rank keeps a shard of parameters, gradients and moments.

Parameters are gathered in units: a block, or the embeddings and the head. For one block of ZeRO-3:

    forward      all-gather the block    compute    free it
    backward     all-gather it again     compute    free it, reduce-scatter its gradients
    optimizer                            update the shard

The embeddings and the head are one unit. It runs at both ends of forward, so it is gathered twice in a pass.
It is still in memory when backward begins. An embedding's backward does not read its weight, so the unit is
not gathered a third time. Its gradients are complete last, and are reduce-scattered last.

Prefetch: when a unit begins to run, the unit before it is freed and the all-gather of the unit after it
starts. So two units are in memory at a time, one that runs and one that arrives. The order of forward is
learned in the pass before. The order of backward is the reverse of this pass's forward.

    zero=3                                 gathered for forward, freed, gathered again for backward
    zero=3, reshard_after_forward=False    gathered once a step, freed at its end
    zero=2                                 always in memory, gathered once a step, by its first forward

Gradients add up in full over the passes of a step. Only the last pass reduce-scatters them.

With `replicas` the shards' gradients are also summed over ranks that have the same shard (HSDP).

    FlatParameters     the memory: full and shard, start_gather, free
    FlatGradients      the same for gradients: start_reduce_scatter
    Unit               gives the modules full parameters or pieces
    FSDP               decides when each of these runs

A piece is the part of a parameter in this rank's shard: 1-D, perhaps empty. The optimizer updates pieces.
ZeRO-1 shards only the optimizer's state (`sharded_optimizer`). It reduce-scatters gradients in the last
backward and all-gathers parameters after the update, by the two flat classes below.

Sources: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from compare.contract.communication import GRADIENTS, PARAMETERS, RECORD, REPLICATE
from torchpar.comm.collectives import Axis, Work, chunk_slices
from torchpar.gpt_stages import GPTStages
from torchpar.model import GPT
from torchpar.private import tree_leaves

AxisOf = Mapping[nn.Parameter, Axis]
"""By parameter, the ranks over which it is sharded: all shards, and for an expert fewer."""


class FlatParameters:
    """Parameters end to end in one flat buffer, of which each rank has a shard. Hooks and ties stay.

    Attributes:
        full: (n,) all parameters, which are views of it. Under zero 3 its storage is freed between uses.
        shard: about (n / R,) this rank's part of `full`; under zero 1 and 2 a view of it. Under zero 3 `full`
            may have 16 bits (`torchpar.gathered`), and the shard is as it is stored.
        pieces: for each parameter the view of its part of the shard.
        is_gathered: True if `full` has the values that the optimizers of all ranks made.
    """

    @torch.no_grad()
    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        axis: Axis,
        *,
        zero: int,
        replicas: Axis,
        ranks: int,
        gathered: torch.dtype | None = None,
    ):
        """Flatten parameters that are sharded over `axis`; gradients are means over `ranks` ranks.

        Under zero 3 `gathered` is the dtype of `full`; None: as the parameters are stored.
        """
        self.parameters, self.axis, self.replicas = list(parameters), axis, replicas
        self.zero, self.ranks = zero, ranks
        self.starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        self.own = chunk_slices(self.starts[-1], axis.size)[axis.rank]
        self.full = parameters[0].detach().new_empty(self.starts[-1])
        for index, parameter in enumerate(parameters):
            self.view(self.full, index).copy_(parameter)
        # All ranks begin equal: broadcast the first rank's values.
        for ranks_with_it in (axis, replicas):
            ranks_with_it.broadcast(self.full, purpose=REPLICATE)
        self.shard = self.full[self.own] if zero < 3 else self.full[self.own].clone()
        self.pieces = [nn.Parameter(self.shard[self.slice_of(n)]) for n in range(len(self.parameters))]
        self.full = self.full.to(gathered or self.full.dtype)
        for index, parameter in enumerate(parameters):
            parameter.data = self.view(self.full, index)
        self.is_gathered = True
        self.work: Work | None = None
        self.gradients = FlatGradients(self)

    def view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """The view of a flat buffer (n,) that has the place and shape of the parameter at `index`."""
        return buffer[self.starts[index] : self.starts[index + 1]].view(self.parameters[index].shape)

    def slice_of(self, index: int) -> slice:
        """The slice of the shard that is the piece of the parameter at `index`."""
        first = max(self.starts[index], self.own.start)
        last = min(self.starts[index + 1], self.own.stop)
        return slice(first - self.own.start, last - self.own.start) if first < last else slice(0, 0)

    def elements_of(self, index: int) -> slice:
        """The elements of the parameter at `index`, row by row, that are in its piece."""
        first, cut = max(self.own.start - self.starts[index], 0), self.slice_of(index)
        return slice(first, first + cut.stop - cut.start) if cut.start < cut.stop else slice(0, 0)

    def on_gradients(self, ready: Callable[[int, torch.Tensor], None]) -> None:
        """Call `ready(index, parameter)` when backward has accumulated a parameter's gradient."""
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(ready, index))

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to gather the parameters from the shards of all ranks."""
        if not self.is_gathered and self.work is None:
            if self.zero == 3:
                self.full.untyped_storage().resize_(self.full.nbytes)
                self.full[self.own] = self.shard
            # Send this rank's shard to all ranks; the unit that runs computes meanwhile.
            self.work = self.axis.start_all_gather(self.full, self.full[self.own], purpose=PARAMETERS)

    def wait_gather(self) -> None:
        """Wait until the parameters are in `full`."""
        if self.work:
            self.work.wait()
            self.work, self.is_gathered = None, True

    def free(self) -> None:
        """Mark `full` as stale, and under zero 3 free its storage."""
        self.wait_gather()
        self.is_gathered = False
        if self.zero == 3:
            # The tensor stays, without memory. Autograd saved views of this storage for backward. They are
            # valid once `start_gather` has filled it again.
            self.full.untyped_storage().resize_(0)


class FlatGradients:
    """The gradients of a step, from backward to the pieces.

    Attributes:
        full: (n,) the sums over the passes of a step, divided by the ranks. None before the first gradient.
        shard: this rank's part of the sum over the ranks, which is the mean. None before the reduction.
        used: indices of the parameters whose gradient is in `full`.
        ready: indices of the parameters whose gradient of the step's last backward is in `full`.
    """

    def __init__(self, flat: FlatParameters):
        self.flat = flat
        self.reset()

    def reset(self) -> None:
        """Prepare for the next step."""
        self.used, self.ready = set[int](), set[int]()
        self.full: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.work: Work | None = None

    @property
    def is_full(self) -> bool:
        """True if all gradients of the step are in `full`."""
        return len(self.ready) == len(self.flat.parameters)

    @torch.no_grad()
    def add(self, index: int, *, is_last: bool) -> None:
        """Move a parameter's gradient into `full`, divided by the ranks: the sum over them is the mean."""
        parameter = self.flat.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self.full is None:
            self.full = self.flat.shard.new_empty(self.flat.full.shape)
        slot = self.flat.view(self.full, index)
        if index in self.used:
            slot.add_(gradient, alpha=1 / self.flat.ranks)
        else:
            torch.div(gradient.to(slot.dtype), self.flat.ranks, out=slot)
            self.used.add(index)
        if is_last:
            self.ready.add(index)

    @torch.no_grad()
    def start_reduce_scatter(self) -> None:
        """Start to sum `full` over the ranks. Each rank gets its shard of the sum."""
        if self.full is not None and self.shard is None:
            own = self.full[self.flat.own]
            self.shard = own if self.flat.zero == 1 else torch.empty_like(own)
            # Sum the gradients of this unit; backward computes the gradients of the unit before it meanwhile.
            self.work = self.flat.axis.start_reduce_scatter(self.shard, self.full, purpose=GRADIENTS)

    @torch.no_grad()
    def start_all_reduce(self) -> None:
        """Wait for the shard, free `full`, and start to sum the shard over the replicas."""
        if self.full is not None and self.shard is not None:
            self.wait()
            self.full = None
            # HSDP: replicas have the same shard, of other data. Sum their shards of the gradient.
            self.work = self.flat.replicas.start_all_reduce(self.shard, purpose=GRADIENTS)

    def wait(self) -> None:
        """Wait for the reduction that was started last."""
        if self.work:
            self.work.wait()
        self.work = None

    @torch.no_grad()
    def finish(self) -> None:
        """Finish the reduction, and add to each piece's gradient its part of the mean."""
        self.start_all_reduce()
        self.wait()
        for index in sorted(self.used):
            assert self.shard is not None
            part, piece = self.shard[self.flat.slice_of(index)], self.flat.pieces[index]
            piece.grad = part if piece.grad is None else piece.grad + part
        self.reset()


class Unit:
    """Modules whose parameters are gathered and freed together. If it `stays`, only at the end of a step."""

    def __init__(self, modules: Sequence[nn.Module], flats: Sequence[FlatParameters], *, stays: bool):
        self.modules, self.flats, self.stays = modules, flats, stays
        piece_of = pieces_of(flats)
        # Every place where a module has one of the parameters; a tied parameter has several.
        self.uses = [
            (holder, name, parameter, piece_of[parameter])
            for holder in dict.fromkeys(holder for module in modules for holder in module.modules())
            for name, parameter in holder._parameters.items()
            if parameter is not None and parameter in piece_of
        ]
        self.free()

    def start_gather(self) -> None:
        """Start to gather the parameters."""
        for flat in self.flats:
            flat.start_gather()

    def wait_gather(self) -> None:
        """Wait for the parameters, and put them into the modules."""
        for flat in self.flats:
            flat.wait_gather()
        for holder, name, parameter, _ in self.uses:
            holder._parameters[name] = parameter

    def free(self) -> None:
        """Put the pieces into the modules, and free the parameters."""
        for holder, name, _, piece in self.uses:
            holder._parameters[name] = piece
        for flat in self.flats:
            flat.free()


class FSDP(nn.Module):
    """Shards the parameters, gradients and optimizer state of a module over ranks.

    Call it as the module. After the last `backward` of a step call `finish_gradient_synchronization`, then
    step an elementwise optimizer over `pieces_of(fsdp.flats)`. All ranks run the same units in the same
    order, and use every parameter. Backwards before the last run with `is_synchronizing` False.

    Args:
        module: outside of its forward and backward it has pieces for parameters.
        units: lists of submodules that are gathered together. Each parameter is in one list.
        axis_of: by parameter the ranks over which it is sharded. Gradients are means over all `shards`.
        replicas: the ranks that have the same shard.
        zero: 3 shards parameters, gradients and optimizer state; 2 gradients and optimizer state.
        reshard_after_forward: with zero 3, free after forward and gather again in backward.
        inputs_only: types of modules, such as embeddings, whose backward does not read their weights: it
            gathers nothing for them.
        fill: gives the modules of a unit their first values, just before they are sharded.
        gathered: under zero 3 the 16-bit dtype of the parameters that are gathered in it.
    """

    is_synchronizing = True

    def __init__(
        self,
        module: nn.Module,
        *,
        units: Sequence[Sequence[nn.Module]],
        axis_of: AxisOf,
        shards: Axis,
        replicas: Axis,
        zero: int,
        reshard_after_forward: bool,
        inputs_only: tuple[type[nn.Module], ...],
        fill: Callable[[Sequence[nn.Module]], None],
        gathered: Mapping[nn.Parameter, torch.dtype] = MappingProxyType({}),
    ):
        super().__init__()
        self.module, self._inputs_only = module, inputs_only
        self.units, in_order = list[Unit](), list(module.parameters())
        how: dict[str, Any] = {"zero": zero, "replicas": replicas, "ranks": shards.size * replicas.size}
        for modules in units:
            fill(modules)
            inside = {parameter for part in modules for parameter in part.parameters()}
            # Experts apart, since fewer ranks have them; and parameters that are gathered in 16 bits.
            alike = dict[tuple[Axis, torch.dtype | None], list[nn.Parameter]]()
            for parameter in (p for p in in_order if p in inside):
                alike.setdefault((axis_of[parameter], gathered.get(parameter)), []).append(parameter)
            flats = [
                FlatParameters(some, axis, gathered=dtype, **how) for (axis, dtype), some in alike.items()
            ]
            self.units.append(Unit(modules, flats, stays=zero == 2 or not reshard_after_forward))
        self.flats = [flat for unit in reversed(self.units) for flat in unit.flats]  # in backward's order
        self._forward_order = list[Unit]()  # units of this pass, as they began to run
        self._expected_order = list[Unit]()  # units of the pass before
        self._saved = list[Unit]()  # units of this pass whose weights backward reads
        self._gathered = list[Unit]()  # the unit that runs, the next one, and units that stay
        self._running: Unit | None = None
        self._reducing: Unit | None = None
        for unit in self.units:
            for part in unit.modules:
                part.register_forward_pre_hook(partial(self.before_forward, unit), prepend=True)
                part.register_forward_hook(partial(self.after_forward, unit))
            for flat in unit.flats:
                flat.on_gradients(partial(self.gradient_ready, unit, flat))

    def forward(self, *args, **kwargs):
        self._running = None
        self._expected_order, self._forward_order = self._forward_order or self._expected_order, []
        self._saved.clear()
        output = self.module(*args, **kwargs)
        self._running = None
        if not torch.is_grad_enabled():  # an evaluation has no backward
            self.free_all()
        return output

    def before_forward(self, unit: Unit, module: nn.Module, args: tuple) -> None:
        """A unit begins to run in forward."""
        if unit is not self._running:
            self._forward_order.append(unit)
            self.switch_to(unit, self._expected_order[len(self._forward_order) :])

    def after_forward(self, unit: Unit, module: nn.Module, args: tuple, output: object) -> None:
        """A module has run: backward enters the unit by the gradient of the module's output."""
        if unit.stays or not torch.is_grad_enabled() or type(module) in self._inputs_only:
            return
        for tensor in (x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad):
            tensor.register_hook(lambda gradient: self.before_backward(unit))
        if self._saved[-1:] != [unit]:
            self._saved.append(unit)

    def before_backward(self, unit: Unit) -> None:
        """A unit begins to run in backward."""
        order = self._saved[::-1]
        self.switch_to(unit, order[order.index(unit) + 1 :] if unit in order else ())

    def switch_to(self, unit: Unit, upcoming: Sequence[Unit]) -> None:
        """Gather a unit, free the units that have run, and start to gather the next one."""
        if unit is not self._running:
            self._running = unit
            for other in [u for u in self._gathered if u is not unit and not u.stays]:
                self._gathered.remove(other)
                other.free()
            self.start_gather(unit)  # unless it was started ahead
            unit.wait_gather()
        if upcoming:
            self.start_gather(upcoming[0])

    def start_gather(self, unit: Unit) -> None:
        """Start to gather a unit that is not gathered."""
        if unit not in self._gathered:
            self._gathered.append(unit)
            unit.start_gather()

    def gradient_ready(self, unit: Unit, flat: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        """Take a gradient that backward has accumulated. The last one of a unit starts its reduction."""
        flat.gradients.add(index, is_last=self.is_synchronizing)
        if self.is_synchronizing and all(flat.gradients.is_full for flat in unit.flats):
            self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """Start to reduce a unit's gradients, and finish the unit before it: two are in memory."""
        for flat in self._reducing.flats if self._reducing else ():
            flat.gradients.start_all_reduce()
        for flat in unit.flats:
            flat.gradients.start_reduce_scatter()
        self._reducing = unit

    def finish_gradient_synchronization(self) -> None:
        """Reduce the remaining units, wait until every piece has its part of the mean, and free all units."""
        for unit in reversed(self.units):
            self.reduce(unit)
        for flat in self.flats:
            flat.gradients.finish()
        self._reducing = None
        self.free_all()

    def free_all(self) -> None:
        """Free all units that are gathered."""
        for unit in self._gathered:
            unit.free()
        self._gathered, self._running = [], None


def units_of(model: GPT | GPTStages) -> list[list[nn.Module]]:
    """The units of a GPT: each block, and the modules before and behind the blocks, with the tied weight.

    In a pipeline the tied weight is a unit, so that the first and the last stage shard it alike. Positions
    and the final norm are in the unit of the nearest block.
    """
    here = dict(model.named_modules(remove_duplicate=False))
    tied, first, last = (
        [here[path] for path in paths if path in here]
        for paths in (("transformer.wte", "lm_head"), ("transformer.wpe",), ("transformer.ln_f",))
    )
    blocks = [[block] for block in model.blocks]
    if isinstance(model, GPT):
        return [tied + first + last, *blocks]
    blocks[0] += first
    blocks[-1] += last
    return [tied, *blocks] if tied else blocks


def pieces_of(flats: Iterable[FlatParameters]) -> dict[torch.Tensor, nn.Parameter]:
    """This rank's piece of each parameter, (n,): the optimizer's parameters."""
    return {p: piece for flat in flats for p, piece in zip(flat.parameters, flat.pieces, strict=True)}


def gather_pieces(
    flats: Iterable[FlatParameters], pieces: Mapping[torch.Tensor, torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Gather full tensors from pieces (n,), both by parameter, for the record. All ranks call it together."""
    full = {}
    for flat in flats:
        shard = torch.cat([pieces[p].reshape(-1) for p in flat.parameters])
        values = shard.new_empty(flat.full.shape)
        flat.axis.all_gather(values, shard, purpose=RECORD)
        full.update((p, flat.view(values, index)) for index, p in enumerate(flat.parameters))
    return full
