"""Flat parameter buffers, cut over the ranks: the memory of all of ZeRO.

`FlatParameters` hold, for parameters of one dtype and device,

    full      the buffer of all of them; the parameters are views of it, and its storage may come and go
    shard     this rank's cut of it, which an optimizer updates
    pieces    a view of the shard for each parameter: 1-D, perhaps empty, named as the parameter is

and the same for their gradients (`flat_gradients`). A `Unit` gives modules the parameters or the pieces. What
moves between the ranks, and when the buffer has memory, is the strategy's: `fully_sharded.unshard` and
`reshard`.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from torchpar.comm.chunks import chunk_slices
from torchpar.comm.collectives import Axis
from torchpar.comm.handles import Work
from torchpar.manual.packs import pack
from torchpar.manual.replicate import replicate
from torchpar.manual.zero.flat_gradients import FlatGradients


class FlatLayout:
    """The parameters end to end, and the buffer cut over an axis.

    Attributes:
        numel: elements of the buffer.
        own: this rank's cut of it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis):
        # Strides like the parameter's, where it is dense: what kernels and autograd expect of it.
        self._shapes = [(p.shape, torch.empty_like(p, device="meta").stride()) for p in parameters]
        self._starts = list(itertools.accumulate((p.numel() for p in parameters), initial=0))
        self.numel = self._starts[-1]
        self.own = chunk_slices(self.numel, axis.size)[axis.rank]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor (n,), one for each parameter, in its shape."""
        return [self.view(flat, index) for index in range(len(self._shapes))]

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """The view of the parameter at `index` alone."""
        return flat.as_strided(*self._shapes[index], self._starts[index])

    def slice_of(self, index: int) -> slice:
        """The slice of this rank's cut that is the piece of the parameter at `index`."""
        first = max(self._starts[index], self.own.start)
        last = min(self._starts[index + 1], self.own.stop)
        return slice(first - self.own.start, last - self.own.start) if first < last else slice(0, 0)

    def elements_of(self, index: int) -> slice:
        """Elements of the parameter at `index` in this rank's piece, in the order of its strides."""
        first, cut = max(self.own.start - self._starts[index], 0), self.slice_of(index)
        return slice(first, first + cut.stop - cut.start) if cut.start < cut.stop else slice(0, 0)


class FlatParameters:
    """Some parameters, cut over an axis. They keep their identity: hooks and tied uses stay.

    Args:
        named: of one dtype and device, by name; their values become those of the first rank.
        axis: the ranks that share them out.
        replicas: ranks that hold the same shard, or None: gradients are averaged over both axes.
        keeps_full: the buffer stays in memory, and the shard is a view of it (ZeRO-1 and 2).
        keeps_gradients: the buffer of gradients stays until they are dropped (ZeRO-1).

    Attributes:
        names, parameters, pieces: in the same order.
        layout: where each parameter lies in the buffer, and its piece in the shard.
        gradients: of the parameters.
        full: the flat buffer (n,), without memory while `is_unsharded` is false and it is not kept.
        shard: this rank's cut (about n / ranks,).
        is_unsharded: the parameters hold what the optimizers of all ranks made of them, when they were
            gathered.
        work: the all_gather under way, or None.
    """

    gradients_of: type[FlatGradients] = FlatGradients

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        axis: Axis,
        *,
        replicas: Axis | None = None,
        keeps_full: bool = False,
        keeps_gradients: bool = False,
    ):
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.axis, self.replicas, self.keeps_full = axis, replicas, keeps_full
        self.layout = FlatLayout(self.parameters, axis)
        self.full, self.shard = self.cut(self.starting_values())
        self.pieces = [
            nn.Parameter(self.shard[self.layout.slice_of(index)], requires_grad=parameter.requires_grad)
            for index, parameter in enumerate(self.parameters)
        ]
        for parameter, view in zip(self.parameters, self.layout.views(self.full), strict=True):
            parameter.data = view
        self.is_unsharded = True
        self.work: Work | None = None
        self.gradients = self.gradients_of(self, keeps_buffer=keeps_gradients)

    @torch.no_grad()
    def starting_values(self) -> torch.Tensor:
        """The parameters of the first rank, end to end (n,)."""
        values = self.parameters[0].detach().new_empty(self.layout.numel)
        for view, parameter in zip(self.layout.views(values), self.parameters, strict=True):
            view.copy_(parameter)
        replicate([values], [self.axis, self.replicas])
        return values

    def cut(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat buffer (n,), which begins with these values, and this rank's shard of it."""
        own = values[self.layout.own]
        return values, own if self.keeps_full else own.clone()

    def on_gradients(self, ready: Callable[[int, torch.Tensor], None]) -> None:
        """Call `ready(index, parameter)` whenever backward has left a parameter's gradient."""
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(ready, index))

    def begin_unshard(self) -> bool:
        """Whether a gather must begin: the parameters are sharded, and no gather is under way."""
        return not self.is_unsharded and self.work is None

    def wait_unshard(self) -> None:
        """Wait until the parameters are unsharded, if they are about to be."""
        if self.work:
            self.work.wait()
            self.work, self.is_unsharded = None, True


def flatten_parameters(
    named: Sequence[tuple[str, nn.Parameter]], axis: Axis, *, limit_bytes: float = float("inf"), **options
) -> list[FlatParameters]:
    """Flat buffers, (n,) each, of some parameters: one for each dtype and device, frozen ones apart.

    Args:
        named, axis, options: as for `FlatParameters`.
        limit_bytes: more buffers, none larger than this, but for a parameter that is.
    """
    return [FlatParameters(members, axis, **options) for members in pack(named, limit_bytes)]


class Unit:
    """Parameters that are unsharded and resharded together, whenever one of some modules runs.

    Attributes:
        modules: while one of these runs, the parameters are unsharded.
        flats: the parameters, as they are cut.
    """

    def __init__(self, modules: Sequence[nn.Module], flats: Sequence[FlatParameters]):
        self.modules, self.flats = modules, flats
        piece_of = {p: piece for flat in flats for p, piece in zip(flat.parameters, flat.pieces, strict=True)}
        holders = dict.fromkeys(holder for module in modules for holder in module.modules())
        self.uses = [  # every place where a module has one of the parameters; a tied one has several
            (holder, name, parameter, piece_of[parameter])
            for holder in holders
            for name, parameter in holder._parameters.items()
            if parameter is not None and parameter in piece_of
        ]

    def wait_unshard(self) -> None:
        """Wait until the parameters are unsharded, and give them to the modules."""
        for flat in self.flats:
            flat.wait_unshard()
        for holder, name, parameter, _ in self.uses:
            holder._parameters[name] = parameter

    def show_pieces(self) -> None:
        """Give the modules this rank's pieces in place of the parameters."""
        for holder, name, _, piece in self.uses:
            holder._parameters[name] = piece
