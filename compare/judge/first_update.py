"""The first update of a run against the definition of the optimizer, from the run's own gradients.

Below float64 the weights of two correct runs part by as much as an update is large: Adam makes every
gradient a step of about lr, also one whose sign is rounding. Given its own gradients an engine has no such
excuse: what it made of them is held to the formulas of `compare.numerics.optimizer`, up to the rounding of
its weights.
"""

import functools

from compare.contract.record import Record, read_tensors
from compare.contract.request import Rung
from compare.judge.tensor_errors import Found, relative_error
from compare.numerics.optimizer import global_norm, moment_names, reference_step
from compare.numerics.parameters import parameter_table

MOMENTS = {"m": Rung.FIRST_M, "v": Rung.FIRST_V}


def first_update(run: Record) -> Found | None:
    """The worst error of weights and moments after the first step, and where it is.

    Tensors are read one by one, and computed with in float64.

    Args:
        run: with its tensors; None comes back for one that lacks them, or begins with moments.

    Raises:
        RecordError: a file of tensors is garbled.
    """
    request, experiment = run.request, run.manifest.experiment
    read = functools.partial(read_tensors, run.folder)
    begin, gradients, after = map(read, (Rung.INITIAL_WEIGHTS, Rung.GRADIENTS, Rung.FIRST_WEIGHTS))
    names = begin.keys() & gradients.keys() & after.keys()
    if not names or run.steps[0].skipped or (request and request.resume):
        return None
    moments = {name: read(MOMENTS[name]) for name in moment_names(experiment.optimizer)}
    norm, updates = global_norm(gradients), request.first_update if request else 0
    worst = (-1.0, "")
    for parameter in parameter_table(experiment.model):
        name = parameter.name
        if name not in names or begin[name].shape != gradients[name].shape:
            continue  # what is missing or misshapen is told at the rung "request"
        weights, made = reference_step(
            experiment.optimizer,
            (parameter,),
            {name: begin[name].astype("float64")},
            {name: gradients[name].astype("float64")},
            {},
            updates,
            norm=norm,
        )
        pairs = {name: (after[name], weights[name])}
        pairs |= {
            f"{which} of {name}": (moments[which][name], made[which][name])
            for which in made
            if name in moments[which]
        }
        for place, (found, expected) in pairs.items():
            worst = max(worst, (relative_error(found, expected), place), key=lambda one: one[0])
    return worst
