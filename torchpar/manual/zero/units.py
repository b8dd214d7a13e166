"""Units of a fully sharded module: the parameters that are unsharded together."""

from collections.abc import Sequence

from torch import nn

from torchpar.manual.zero.flat_parameters import FlatParameters


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
