"""Pieces of all parameters that a rank holds, and what they are pieces of."""

from collections.abc import Mapping

import torch
from torch import nn

from compare.contract.communication import RECORD
from torchpar.manual.zero.flat_parameters import FlatParameters

TensorsByParameter = Mapping[torch.Tensor, torch.Tensor]


class HoldsPieces:
    """A holder of flat buffers: this rank's pieces of some parameters."""

    flats: list[FlatParameters]

    @property
    def piece_by_parameter(self) -> dict[torch.Tensor, nn.Parameter]:
        """This rank's piece of each parameter: 1-D, perhaps empty, what an optimizer updates."""
        return {
            p: piece for flat in self.flats for p, piece in zip(flat.parameters, flat.pieces, strict=True)
        }

    @property
    def elements_by_parameter(self) -> dict[torch.Tensor, slice]:
        """Elements of each flattened parameter, (numel,), in its piece."""
        return {p: flat.layout.elements_of(n) for flat in self.flats for n, p in enumerate(flat.parameters)}

    def gather_by_parameter(self, pieces: TensorsByParameter) -> TensorsByParameter:
        """Full tensors, shaped as the parameters, from all ranks' pieces (n,). All ranks call it at once."""
        full: dict[torch.Tensor, torch.Tensor] = {}
        for flat in self.flats:
            shard = torch.cat([pieces[p].reshape(-1) for p in flat.parameters])
            values = shard.new_empty(flat.layout.numel)
            flat.axis.all_gather(values, shard, purpose=RECORD)
            full.update(zip(flat.parameters, flat.layout.views(values), strict=True))
        return full
