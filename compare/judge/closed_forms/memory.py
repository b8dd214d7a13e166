"""Memory of a layout on each device between two steps, in closed form: the records are held against it.

    elements of a stage    its blocks / tp, where tp splits them; the first stage has both embeddings, the
                           last one the final norm and its own copy of the token embedding, the tied head
    parameters             / dp_shard from ZeRO-3 on; FSDP2's ZeRO-2 keeps shards between steps, too
    gradients              / dp_shard from ZeRO-2 on; torch-compiler has scattered ZeRO-1's, too
    optimizer              its moments, / dp_shard from ZeRO-1 on; none with offload, but as much on the host

That is a device's share. Where shards cannot all be equal, the fullest device has more.

Sources: ZeRO (Rajbhandari et al., arXiv 1910.02054); Megatron (arXiv 1909.08053), whose row biases and norms
every device of tp repeats.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping

from compare.contract.record import ON_HOST
from compare.numerics.gpt2_names import input_dims
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import Parameter, block_parameters, end_parameters, storage_dtype
from compare.spec.axes import PP, SPLIT, TP
from compare.spec.engines.registry import ENGINES, TORCH
from compare.spec.experiment import Experiment, Layout, Model

KINDS = ("parameters", "gradients", "optimizer")
STEP_BYTES = 4
"""Of the number of updates, which PyTorch's AdamW keeps for each parameter."""


def closed_form(engine: str, experiment: Experiment, *, rounds_up: bool = False) -> dict[str, list[float]]:
    """Bytes at rest by kind, for each device in the order of the mesh.

    With `rounds_up` those of the fullest devices, for parts of tp and dp_shard as the engine cuts them.
    """
    return by_device(state_of_stage, engine, experiment, rounds_up=rounds_up)


def by_device(
    bytes_of_stage: Callable[..., dict[str, float]], engine: str, experiment: Experiment, **how: bool
) -> dict[str, list[float]]:
    """Bytes by kind of every device in the order of the mesh, from those of each rank of the pipeline."""
    layout = experiment.layout
    of_stage = [bytes_of_stage(engine, experiment, stage=stage, **how) for stage in range(layout.pp)]
    stages = [layout.coordinates(device)[PP] for device in range(layout.devices)]
    return {kind: [of_stage[stage][kind] for stage in stages] for kind in of_stage[0]}


def state_of_stage(
    engine: str, experiment: Experiment, *, stage: int, rounds_up: bool = False
) -> dict[str, float]:
    """Bytes at rest by kind on each device of one rank of the pipeline."""
    layout, split_from = experiment.layout, ENGINES[engine].holds.sharded_from
    elements = elements_of_stage(engine, experiment, stage=stage)
    parameters = parameters_of_stage(engine, experiment, stage=stage) if rounds_up else []
    held, moments = {}, len(moment_names(experiment.optimizer))
    for kind, copies in zip(KINDS, (1, 1, moments), strict=True):
        shards = layout.dp_shard if layout.zero >= split_from[kind] else 1
        share = _fullest(engine, parameters, layout, shards) if rounds_up else elements / shards
        held[kind] = copies * storage_dtype(experiment).itemsize * share
    if ENGINES[engine].side == TORCH.name and moments:
        held["optimizer"] += STEP_BYTES * len(parameters)
    if layout.offload == "optimizer":
        held |= {ON_HOST: held["optimizer"], "optimizer": 0.0}
    return held


def excess(
    measured: Mapping[str, list[int]],
    expected: Mapping[str, list[float]],
    most: Mapping[str, list[float]] | None = None,
) -> float:
    """Distance of the device that is furthest from the closed form, as a fraction of it; 0.05 is 5 %.

    No device may hold more than the fullest one (`most`; by default its share), and all together not less
    than their shares: one may hold less, where another holds more.
    """
    worst = 0.0
    for kind, wanted in expected.items():
        found = measured.get(kind) or [0] * len(wanted)
        if not any(wanted):
            worst = max(worst, float(any(found)))
            continue
        whole = min(sum(found) / sum(wanted) - 1, 0.0)
        each = max(0.0, *(got / want - 1 for got, want in zip(found, (most or expected)[kind], strict=True)))
        worst = max((worst, whole, each), key=abs)
    return worst


def elements_of_stage(engine: str, experiment: Experiment, *, stage: int) -> float:
    """Parameters of one rank of a pipeline that are on one device of tp."""
    layout = experiment.layout
    return _elements(engine, experiment.model, layout.pp, layout.tp, stage)


@functools.lru_cache(maxsize=1024)
def _elements(engine: str, model: Model, pp: int, tp: int, stage: int) -> float:
    whole = Experiment(model=model, layout=Layout(pp=pp, tp=tp))
    return on_one_of_tp(parameters_of_stage(engine, whole, stage=stage), whole.layout)


def parameters_of_stage(engine: str, experiment: Experiment, *, stage: int) -> list[Parameter]:
    """Parameters that one rank of a pipeline holds, in canonical order; blocks by the names of the first."""
    layout, model = experiment.layout, experiment.model
    (token, *positions), final_norm = end_parameters(model)
    everywhere = ENGINES[engine].holds.ends_on_every_stage
    first, last = everywhere or stage == 0, everywhere or stage == layout.pp - 1
    held = [token] if first or last else []
    held += positions if first else []
    held += model.n_layer // layout.pp * list(block_parameters(model, 0))
    return held + (final_norm if last else [])


def on_one_of_tp(parameters: Iterable[Parameter], layout: Layout) -> float:
    """Elements of these parameters on one device of tp: its part of those that are split, and all others."""
    return sum(p.size / (layout.tp if is_split_by_tp(p) else 1) for p in parameters)


def _fullest(engine: str, parameters: Iterable[Parameter], layout: Layout, shards: int) -> float:
    """Elements of these parameters on the device that has most."""
    cuts, tp = ENGINES[engine].holds.cuts, layout.tp
    if cuts == "rows" and layout.zero == 1 and ENGINES[engine].sends_by == "pytorch" and shards > 1:
        held = [0] * shards  # ZeroRedundancyOptimizer gives whole parameters to whoever has least
        for parameter in sorted(parameters, key=lambda p: (not p.is_matrix, -p.size)):
            held[held.index(min(held))] += parameter.size
        return max(held)
    parts = layout.dp_shard if cuts == "dims" else shards  # JAX pads what it does not split, too
    return parts // shards * sum(largest_part(parameter, cuts, tp, parts) for parameter in parameters)


def largest_part(parameter: Parameter, cuts: str, tp: int, shards: int) -> float:
    """Elements of the largest of the parts that tp, and within them dp_shard, makes of a parameter."""
    sizes = [
        -(-size // tp) if SPLIT.get(axis) == TP else size
        for size, axis in zip(parameter.shape, parameter.axes, strict=True)
    ]
    elements = math.prod(sizes)
    if cuts == "flat":
        return elements / shards
    if cuts == "rows":  # nanoGPT's: a Linear's outputs
        inputs = input_dims(parameter)
        rows = sizes[0] if parameter.is_matrix and not inputs else math.prod(sizes[inputs:])
        return -(-rows // shards) * elements // rows
    if any(size % shards == 0 for size in sizes):
        return elements // shards
    free = [size for size, axis in zip(sizes, parameter.axes, strict=True) if SPLIT.get(axis) != TP]
    padded = max(free if tp > 1 and free else sizes)
    return -(-padded // shards) * elements // padded


def padding_of_stage(engine: str, experiment: Experiment, *, stage: int) -> float:
    """How many times as large a stage's blocks, ends or token embedding are at most, if parts of tp and
    dp_shard are all as large as the largest: 1 if they are equal."""
    layout, cuts = experiment.layout, ENGINES[engine].holds.cuts
    block = list(block_parameters(experiment.model, 0))
    ends = [p for p in parameters_of_stage(engine, experiment, stage=stage) if p not in block]

    def padding(parameters: list[Parameter]) -> float:
        largest = sum(largest_part(p, cuts, layout.tp, layout.dp_shard) for p in parameters)
        return layout.dp_shard * largest / on_one_of_tp(parameters, layout)

    return max(padding(parameters) for parameters in (block, ends, ends[:1]) if parameters)


def is_split_by_tp(parameter: Parameter) -> bool:
    """True if tensor parallelism splits it; false if every device of tp has all of it."""
    return TP in map(SPLIT.get, parameter.axes)
