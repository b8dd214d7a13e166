"""What PyTorch's own wrappers send, where that is not what torch-manual sends.

Rows that differ, each with the name of its pattern (`compare.judge.known_deviations`), as the code of PyTorch
2.13 has it: `torch.distributed` optim.ZeroRedundancyOptimizer, fsdp.fully_shard (its root keeps
`reshard_after_forward` off), tensor.parallel.loss_parallel, pipelining. Another version may do otherwise.
"""

from compare.contract.communication import GRADIENTS, LOSS, PARAMETERS, REPLICATED_GRADIENTS, UNUSED
from compare.judge.closed_forms.communication import Bytes
from compare.judge.closed_forms.memory import is_split_by_tp, parameters_of_stage
from compare.judge.closed_forms.sizes import bytes_of, microbatches_of
from compare.judge.closed_forms.xla import Deviations
from compare.numerics.parameters import block_parameters, end_parameters
from compare.pipeline.schedules import Kind, make_schedule
from compare.spec.axes import DP_REPLICATE, DP_SHARD, SHARDED_FROM, TP
from compare.spec.experiment import Experiment

INT32 = 4  # bytes
ROW_BIAS = ("attention.out.bias", "mlp.down.bias")

OWNERS = "ZeroRedundancyOptimizer"
EACH_PASS = "FSDP2 gathers for each pass"
ROOT_STAYS = "FSDP2's root stays"
BLOCKS_STAY = "FSDP2 in a pipeline"
REDUCED_LOSS = "loss in three reductions"
ROW_BIASES = "row biases' gradients are whole"
NOT_SCATTERED = "reduced before they are scattered"
USED_MAP = "DDP's map of used parameters"


def by_pytorch(engine: str, experiment: Experiment, expected: Bytes, *, stage: int) -> Deviations:
    """Rows of an engine of PyTorch's wrappers that are not torch-manual's.

    Args:
        engine: whose stages are meant.
        experiment: with `layout.remat` resolved.
        expected: the closed form, on one rank of the pipeline.
        stage: that rank.
    """
    layout = experiment.layout
    found: Deviations = {}
    if layout.zero == 1:
        scattered = expected["reduce_scatter", DP_SHARD, GRADIENTS]
        found |= {
            ("reduce_scatter", DP_SHARD, GRADIENTS): (0, OWNERS),
            ("all_gather", DP_SHARD, PARAMETERS): (0, OWNERS),
            ("all_reduce", DP_SHARD, GRADIENTS): (scattered, OWNERS),
            ("broadcast", DP_SHARD, PARAMETERS): (scattered, OWNERS),
        }
    elif layout.zero:
        found["all_gather", DP_SHARD, PARAMETERS] = _gathered(experiment, stage)
    if gathered := expected.get(("all_gather", TP, LOSS)):
        found["all_gather", TP, LOSS] = (0, REDUCED_LOSS)
        found["all_reduce", TP, LOSS] = (gathered / layout.tp, REDUCED_LOSS)
    if layout.sequence_parallel:
        held = parameters_of_stage(engine, experiment, stage=stage)
        partial = [p for p in held if not is_split_by_tp(p) and not p.name.endswith(ROW_BIAS)]
        pattern = f"{ROW_BIASES}, {NOT_SCATTERED}" if layout.zero else ROW_BIASES
        found["all_reduce", TP, REPLICATED_GRADIENTS] = (bytes_of(partial, experiment), pattern)
    if (
        layout.pp > 1
        and layout.dp_replicate > 1
        and layout.zero < SHARDED_FROM["gradients"]
        and layout.tp == 1
    ):
        parameters = parameters_of_stage(engine, experiment, stage=stage)
        found["all_reduce", DP_REPLICATE, UNUSED] = (INT32 * len(parameters), USED_MAP)
    return found


def _gathered(experiment: Experiment, stage: int) -> tuple[float, str]:
    """Bytes of parameters that FSDP2 gathers: units are blocks, and all else one, its root.

    A root stays gathered from forward to backward; blocks with FULL_SHARD do not. In a pipeline no backward
    but the last reshards: a forward that follows one finds everything there.
    """
    model, layout = experiment.model, experiment.layout
    (token, position), norm = end_parameters(model)
    blocks = model.n_layer // layout.pp * bytes_of(block_parameters(model, 0), experiment)
    first, last = stage == 0, stage == layout.pp - 1
    ends = [token] if first or last else []
    root = bytes_of([*ends, *([position] if first else []), *(norm if last else [])], experiment)
    reshards = layout.zero >= SHARDED_FROM["parameters"] and layout.reshard_after_forward
    if layout.pp == 1:
        passes = microbatches_of(experiment)
        return (
            (passes * (root + 2 * blocks), ROOT_STAYS) if reshards else (passes * (root + blocks), EACH_PASS)
        )
    gathers, there = 0, False
    for task in make_schedule(layout.schedule, ranks=layout.pp, microbatches=microbatches_of(experiment))[
        stage
    ]:
        if task.kind != Kind.BACKWARD_WEIGHT:
            gathers += not there
            there = not reshards or task.kind != Kind.FORWARD
    return root + gathers * blocks, BLOCKS_STAY
