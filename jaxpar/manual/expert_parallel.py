"""Expert parallelism by hand."""

from functools import partial
from typing import Any

from compare.contract.communication import LOSS, ROUTING
from compare.spec.axes import DATA, TP
from jaxpar.comm import collectives
from jaxpar.model import GPT
from jaxpar.problem import Problem
from jaxpar.step import Strategy


def strategy(problem: Problem, placements: Any) -> Strategy:
    """The load-balance loss is of the tokens of all devices."""
    if not problem.experiment.model.n_experts:
        return Strategy()
    layout = problem.layout

    def edit(model: GPT) -> None:
        tokens = (*DATA, TP) if layout.sequence_parallel else DATA  # the axes whose devices have others
        model.total_counts = partial(collectives.all_reduce, axis=tokens, purpose=ROUTING)
        if layout.sequence_parallel:
            model.mean_probability = lambda p_LE: (
                collectives.all_reduce(p_LE, TP, purpose=LOSS) / collectives.axis_size(TP)
            )

    return Strategy(edit)
