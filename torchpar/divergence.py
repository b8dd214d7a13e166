"""Search for the first gradient that is not finite, over all ranks, after a step that diverged."""

import torch

from compare.contract.parameters import parameter_table
from torchpar.parallel_model import local
from torchpar.state import Run
from torchpar.weights import nanogpt_name


def first_gradient_not_finite(run: Run) -> str:
    """A clause that names it. All ranks call this together: each looks at its own pieces.

    `optimizer_step` leaves the gradients as they are if their norm is not finite.
    """
    mine = [
        name
        for name, parameter in run.parallel.parameters.items()
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all()
    ]
    with run.mesh.traffic.paused():
        found = {name for names in run.mesh.world.all_gather_objects(mine) for name in names}
    rows = parameter_table(run.experiment.model)
    first = next((row.name for row in rows if nanogpt_name(row.name) in found), "")
    if first:
        return f"the first gradient that is not finite is that of {first}"
    return "every entry of every gradient is finite"
