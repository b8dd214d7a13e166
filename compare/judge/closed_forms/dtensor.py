"""What DTensor sends under torch-compiler's placements, where that is not what torch-manual sends.

Rows that differ, each with the name of its pattern (`compare.judge.known_deviations`).
"""

from compare.contract.communication import GRADIENTS, LOSS, PARAMETERS, REPLICATED_GRADIENTS
from compare.judge.closed_forms.communication import Bytes
from compare.judge.closed_forms.library import REDUCED_LOSS, ROW_BIAS, ROW_BIASES
from compare.judge.closed_forms.memory import is_split_by_tp
from compare.judge.closed_forms.sizes import bytes_of, microbatches_of
from compare.judge.closed_forms.xla import Deviations
from compare.numerics.parameters import block_parameters, end_parameters, parameter_table
from compare.spec.axes import DP_SHARD, SHARDED_FROM, TP
from compare.spec.experiment import Experiment

SCATTERED = "scattered by each pass"
ONCE = "gathered once a step"


def by_dtensor(experiment: Experiment, expected: Bytes) -> Deviations:
    """Rows of torch-compiler that are not torch-manual's.

    Args:
        experiment: with `layout.remat` resolved.
        expected: the closed form.
    """
    layout, passes = experiment.layout, microbatches_of(experiment)
    found: Deviations = {}
    scatter, gather = ("reduce_scatter", DP_SHARD, GRADIENTS), ("all_gather", DP_SHARD, PARAMETERS)
    if layout.zero >= SHARDED_FROM["gradients"] and passes > 1:
        found[scatter] = (passes * expected[scatter], SCATTERED)
    if layout.zero == SHARDED_FROM["parameters"] and layout.reshard_after_forward:
        (embeddings, norm), model = end_parameters(experiment.model), experiment.model
        blocks = model.n_layer * bytes_of(block_parameters(model, 0), experiment)
        found[gather] = (bytes_of([*embeddings, *norm], experiment) + 2 * passes * blocks, ONCE)
    if gathered := expected.get(("all_gather", TP, LOSS)):
        found["all_gather", TP, LOSS] = (0, REDUCED_LOSS)
        found["all_reduce", TP, LOSS] = (gathered / layout.tp, REDUCED_LOSS)
    if layout.sequence_parallel:
        partial = [p for p in parameter_table(experiment.model) if not is_split_by_tp(p)]
        summed = [p for p in partial if not p.name.endswith(ROW_BIAS)]
        shards = layout.dp_shard if layout.zero else 1
        found["all_reduce", TP, REPLICATED_GRADIENTS] = (bytes_of(summed, experiment) / shards, ROW_BIASES)
    return found
