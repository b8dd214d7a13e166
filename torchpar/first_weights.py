"""First values of a model that is made without memory: on each rank only those of the part that it keeps.

A model on PyTorch's meta device has shapes alone. A strategy cuts it as it would cut any other, and has what
is left filled: a part of tensor parallelism, a stage of a pipeline, and for a fully sharded model one unit
after the other, each just before it is cut. A rank's memory at start is then what it keeps, and one unit.
"""

from collections.abc import Iterable

import torch
from torch import nn

from compare.numerics.parameters import parameter_table
from compare.numerics.weights import Weights
from compare.spec.axes import SPLIT, TP
from compare.spec.experiment import Experiment
from torchpar.comm.mesh import Mesh
from torchpar.dtensors import elements_of, empty_on
from torchpar.model import GPT
from torchpar.parallel_model import local
from torchpar.shards import fill, shard_of
from torchpar.weights import nanogpt_name


def empty_model(experiment: Experiment) -> GPT:
    """The whole model on the meta device: shapes and dtypes, no values and no memory."""
    dtype = torch.float64 if experiment.precision.dtype == "float64" else torch.float32
    with torch.device("meta"):
        return GPT(experiment.model, loss_chunks=experiment.train.loss_chunks).to(dtype=dtype)


class FirstWeights:
    """Fills parameters of a GPT that have no memory yet.

    Args:
        weights: by canonical name; read where a parameter is filled, and as far as this rank keeps it.
        experiment: of the model.
        mesh: this rank's.
    """

    def __init__(self, weights: Weights, experiment: Experiment, mesh: Mesh):
        self._weights, self._mesh = weights, mesh
        self._rows = {nanogpt_name(row.name): row for row in parameter_table(experiment.model)}

    def fill(self, model: nn.Module, within: Iterable[nn.Module] | None = None) -> None:
        """Give parameters memory on this rank's device, and their values; those that have some stay.

        Args:
            model: a GPT or stages of it, perhaps cut by tensor parallelism or placed as DTensors.
            within: only the parameters of these modules of it; None for all.
        """
        chosen = None if within is None else {p for module in within for p in module.parameters()}
        for name, parameter in model.named_parameters():
            if local(parameter).is_meta and (chosen is None or parameter in chosen):
                _allocate(parameter, self._mesh.device)
                row = self._rows[name]
                over_tp = self._mesh[TP].size > 1 and any(SPLIT.get(axis) == TP for axis in row.axes)
                part = shard_of(row, self._mesh, over_tp=over_tp, elements=elements_of(parameter, self._mesh))
                fill(local(parameter).detach(), part, self._weights)


def _allocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter memory. It stays itself: ties, hooks and marks."""
    real = nn.Parameter(empty_on(parameter.detach(), device), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)
