"""Units in which torch-manual gathers and cuts parameters: what that sends, in closed form."""

from compare.judge.closed_forms.memory import is_split_by_tp, on_one_of_tp
from compare.judge.closed_forms.sizes import bytes_of, itemsize_of, microbatches_of
from compare.numerics.parameters import Parameter, block_parameters, end_parameters
from compare.pipeline.schedules import Kind, make_schedule
from compare.spec.experiment import Experiment


def units_of_torch(experiment: Experiment, stage: int) -> list[list[Parameter]]:
    """Parameters that torch-manual gathers together: what `torchpar.gpt_stages.units_of` says.

    Blocks, and last all else. In a pipeline that is the tied embedding, if the rank has it, and what else is
    at an end goes with the block next to it.
    """
    model, layout = experiment.model, experiment.layout
    (token, position), norm = end_parameters(model)
    blocks = [list(block_parameters(model, 0)) for _ in range(model.n_layer // layout.pp)]
    if layout.pp == 1:
        return [*blocks, [token, position, *norm]]
    first, last = stage == 0, stage == layout.pp - 1
    if first:
        blocks[0].insert(0, position)
    if last:
        blocks[-1] += norm
    return [*blocks, [token]] if first or last else blocks


def gathered_by_torch(experiment: Experiment, stage: int) -> float:
    """Bytes that ZeRO-3 gathers in a step: what runs and what is next is there, and all else is freed.

    Raises:
        ValueError: ranks of several stages, where it is not known what is gathered ahead.
    """
    layout = experiment.layout
    sizes = [bytes_of(unit, experiment) for unit in units_of_torch(experiment, stage)]
    if layout.pp == 1:
        return 2 * microbatches_of(experiment) * sum(sizes)
    if layout.chunks > 1:
        raise ValueError(f"layout.chunks = {layout.chunks}: no closed form of what ZeRO-3 gathers ahead")
    blocks, tied = list(range(experiment.model.n_layer // layout.pp)), [len(sizes) - 1]
    first, last = stage == 0, stage == layout.pp - 1
    forward, backward = tied * first + blocks + tied * last, tied * last + blocks[::-1]
    orders = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.BACKWARD_INPUT: backward}
    microbatches = microbatches_of(experiment)
    gathered, there = 0.0, set[int]()
    for task in make_schedule(layout.schedule, ranks=layout.pp, microbatches=microbatches)[stage]:
        order = orders.get(task.kind, [])
        for place, unit in enumerate(order):
            needed = set(order[place : place + 2])
            there &= {unit}
            gathered += sum(sizes[one] for one in needed - there)
            there |= needed
    return gathered


def replicated_by_torch(experiment: Experiment, stage: int) -> float:
    """Bytes of a rank's shards of what tp does not split, under ZeRO-2 and 3: of the rank that has most.

    Units are cut flat, so that some ranks have more of it than others.
    """
    layout = experiment.layout
    of_rank = [0] * layout.dp_shard
    for unit in units_of_torch(experiment, stage):
        sizes = [round(on_one_of_tp([p], layout)) for p in unit]
        share, begin = -(-sum(sizes) // layout.dp_shard), 0
        for parameter, size in zip(unit, sizes, strict=True):
            for rank in range(layout.dp_shard) if not is_split_by_tp(parameter) else ():
                of_rank[rank] += max(0, min(begin + size, (rank + 1) * share) - max(begin, rank * share))
            begin += size
    return itemsize_of(experiment) * max(of_rank)
