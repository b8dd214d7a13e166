"""Search for the first gradient or weight that is not finite, over all ranks, after a step that diverged."""

from collections.abc import Mapping

import torch

from compare.numerics.parameters import parameter_table
from torchpar.parallel_model import local
from torchpar.state import Run
from torchpar.weights import nanogpt_name


def first_gradient_not_finite(run: Run) -> str:
    """A clause that names it. All ranks call this together: each looks at its own pieces.

    `optimizer_step` leaves the gradients as they are if their norm is not finite. A peer has dropped them by
    then: its weights tell.
    """
    gradients = {name: p.grad for name, p in run.parallel.parameters.items() if p.grad is not None}
    mine = (bool(gradients), _not_finite(gradients), _not_finite(run.parallel.parameters))
    with run.mesh.traffic.paused():
        kept, of_gradients, of_weights = zip(*run.mesh.world.all_gather_objects(mine), strict=True)
    what, found = ("gradient", of_gradients) if any(kept) else ("weight", of_weights)
    names = {name for names in found for name in names}
    rows = parameter_table(run.experiment.model)
    first = next((row.name for row in rows if nanogpt_name(row.name) in names), "")
    if first:
        return f"the first {what} that is not finite is that of {first}"
    return f"every entry of every {what} is finite"


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of this rank's tensors with an entry that is not finite."""
    return [name for name, tensor in tensors.items() if not torch.isfinite(local(tensor.detach())).all()]
