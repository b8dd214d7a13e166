"""Flat memory of parameters and gradients, cut over the ranks: what ZeRO-1, 2 and 3 keep and move.

`FlatParameters` hold, for parameters,

    full      (n,) all of them end to end: each is a view of it, and its storage may come and go
    shard     (about n / ranks,) this rank's cut of it, which an optimizer updates
    pieces    a view of the shard for each parameter: 1-D, perhaps empty

and `FlatGradients` the same for their gradients. A `Unit` gives modules the parameters or the pieces. What
moves between the ranks, and when: `fully_sharded`, `sharded_optimizer`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from compare.contract.communication import RECORD
from torchpar.comm.collectives import Axis, Work, chunk_slices
from torchpar.manual.flat import Flat, NamedParameters, ranks_of, replicate


class FlatParameters(Flat):
    """Some parameters, cut over an axis. They keep their identity: hooks and tied uses stay.

    Args:
        named: by name; their values become those of the first rank.
        axis: the ranks that share them out, or fewer (`flat.ranks_of`); gradients are means over all of them.
        zero: under 1 and 2 `full` stays in memory, and the shard is a view of it; under 1 the gradients, too.
        replicas: ranks that hold the same shard: gradients are averaged over both axes.

    It `is_unsharded` where the parameters hold what the optimizers of all ranks made of them.
    """

    @torch.no_grad()
    def __init__(self, named: NamedParameters, axis: Axis, *, zero: int, replicas: Axis):
        super().__init__(named)
        self.ranks = axis.size * replicas.size
        axis = ranks_of(self.parameters[0], axis)
        self.axis, self.replicas, self.zero = axis, replicas, zero
        self.own = chunk_slices(self.starts[-1], axis.size)[axis.rank]  # this rank's cut
        self.full = self.parameters[0].detach().new_empty(self.starts[-1])
        for index, parameter in enumerate(self.parameters):
            self.view(self.full, index).copy_(parameter)
        replicate([self.full], [axis, replicas])
        self.shard = self.full[self.own] if zero < 3 else self.full[self.own].clone()
        self.pieces = [nn.Parameter(self.shard[self.slice_of(n)]) for n in range(len(self.parameters))]
        for index, parameter in enumerate(self.parameters):
            parameter.data = self.view(self.full, index)
        self.is_unsharded = True
        self.work: Work | None = None
        self.gradients = FlatGradients(self)

    def slice_of(self, index: int) -> slice:
        """The slice of this rank's shard that is the piece of the parameter at `index`."""
        first = max(self.starts[index], self.own.start)
        last = min(self.starts[index + 1], self.own.stop)
        return slice(first - self.own.start, last - self.own.start) if first < last else slice(0, 0)

    def elements_of(self, index: int) -> slice:
        """Elements of the parameter at `index` in this rank's piece, row by row."""
        first, cut = max(self.own.start - self.starts[index], 0), self.slice_of(index)
        return slice(first, first + cut.stop - cut.start) if cut.start < cut.stop else slice(0, 0)

    def on_gradients(self, ready: Callable[[int, torch.Tensor], None]) -> None:
        """Call `ready(index, parameter)` whenever backward has left a parameter's gradient."""
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(ready, index))

    def wait_unshard(self) -> None:
        if self.work:
            self.work.wait()
            self.work, self.is_unsharded = None, True


class FlatGradients:
    """The gradients of a step, from backward to this rank's pieces.

    Attributes:
        used: indices of the parameters that have a gradient.
        ready: indices of those whose gradient of the step's last backward is there.
        full: (n,) what backward adds up, each gradient divided by the ranks, until it is summed over them.
        shard: this rank's cut of the sum, which is the mean, once its reduction has begun.
    """

    def __init__(self, flat: FlatParameters):
        self.flat = flat
        self.reset()

    def reset(self) -> None:
        self.used, self.ready = set[int](), set[int]()
        self.full: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.work: Work | None = None

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.flat.parameters)

    @torch.no_grad()
    def add(self, index: int) -> None:
        """Take the gradient that backward left on the parameter at `index`, and add it to the buffer.

        It is divided by the ranks on the way, so that their sum is the mean without a pass of its own.
        """
        parameter = self.flat.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self.full is None:
            self.full = torch.empty_like(self.flat.full)
        slot = self.flat.view(self.full, index)
        if index in self.used:
            slot.add_(gradient, alpha=1 / self.flat.ranks)
        else:
            torch.div(gradient, self.flat.ranks, out=slot)
            self.used.add(index)

    def wait(self) -> None:
        if self.work:
            self.work.wait()
        self.work = None

    def hand_out(self) -> None:
        """Add its part of the shard of the mean, (n,), to each piece's gradient."""
        for index in sorted(self.used):
            assert self.shard is not None
            part, piece = self.shard[self.flat.slice_of(index)], self.flat.pieces[index]
            piece.grad = part if piece.grad is None else piece.grad + part
        self.reset()


class Unit:
    """Parameters that are gathered and freed together, whenever one of `modules` runs; if it `stays`, at the
    end of a step. `uses` are the places where a module has one of them; a tied one has several."""

    def __init__(self, modules: Sequence[nn.Module], flats: Sequence[FlatParameters], *, stays: bool):
        self.modules, self.flats, self.stays = modules, flats, stays
        piece_of = pieces_of(flats)
        self.uses = [
            (holder, name, parameter, piece_of[parameter])
            for holder in dict.fromkeys(holder for module in modules for holder in module.modules())
            for name, parameter in holder._parameters.items()
            if parameter is not None and parameter in piece_of
        ]
        self.reshard()

    def wait_unshard(self) -> None:
        """Wait until the parameters are unsharded, and give them to the modules."""
        for flat in self.flats:
            flat.wait_unshard()
        for holder, name, parameter, _ in self.uses:
            holder._parameters[name] = parameter

    def reshard(self) -> None:
        """Free the parameters, unless the buffer is kept, and give the modules this rank's pieces."""
        for holder, name, _, piece in self.uses:
            holder._parameters[name] = piece
        for flat in self.flats:
            flat.wait_unshard()
            flat.is_unsharded = False
            if flat.zero == 3:
                # The tensor stays, without memory: autograd saved views of this storage for backward, and
                # they are valid again once it has been gathered again.
                flat.full.untyped_storage().resize_(0)


def pieces_of(flats: Iterable[FlatParameters]) -> dict[torch.Tensor, nn.Parameter]:
    """This rank's piece of each parameter, (n,): what an optimizer updates."""
    return {p: piece for flat in flats for p, piece in zip(flat.parameters, flat.pieces, strict=True)}


def gather_pieces(
    flats: Iterable[FlatParameters], pieces: Mapping[torch.Tensor, torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Full tensors by parameter, shaped as it, from all ranks' pieces (n,). All ranks call it at once."""
    full = {}
    for flat in flats:
        shard = torch.cat([pieces[p].reshape(-1) for p in flat.parameters])
        values = shard.new_empty(flat.full.shape)
        flat.axis.all_gather(values, shard, purpose=RECORD)
        full.update((p, flat.view(values, index)) for index, p in enumerate(flat.parameters))
    return full
