"""Memory of a layout on each device between two steps, in closed form: the records are held against it.

    elements of a stage    its blocks / tp, where tp splits them, and experts / ep; the first stage has both
                           embeddings, the last one the final norm and its own copy of the tied head
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
from compare.formats.gpt2_names import input_dims
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import Parameter, block_parameters, end_parameters, storage_dtype
from compare.spec.axes import DP_SHARD, EP, PP, SPLIT, TP
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
    parameters = parameters_of_stage(engine, experiment, stage=stage) if rounds_up else []
    held, moments = {}, len(moment_names(experiment.optimizer))
    for kind, copies in zip(KINDS, (1, 1, moments), strict=True):
        is_split = layout.zero >= split_from[kind]
        share = elements_of_stage(engine, experiment, stage=stage, sharded=is_split)
        if rounds_up:
            share = _fullest(engine, parameters, layout, is_split=is_split)
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


def elements_of_stage(
    engine: str, experiment: Experiment, *, stage: int, sharded: bool = False, by_ep: bool | None = None
) -> float:
    """Parameters of one rank of a pipeline that are on one device of tp and ep; `sharded` is ZeRO's share.

    All of them, or those that ep splits, or does not split. ZeRO's share of an expert is as large as of any
    other: of ep's part of it, what each rank of dp_shard has that ep leaves.
    """
    layout, model = experiment.layout, experiment.model
    ep = 1 if sharded and by_ep is None else layout.ep
    elements = _elements(engine, model, layout.pp, layout.tp, ep, stage, by_ep)
    return elements / (layout.axes[DP_SHARD] if by_ep else layout.dp_shard) if sharded else elements


@functools.lru_cache(maxsize=1024)
def _elements(engine: str, model: Model, pp: int, tp: int, ep: int, stage: int, by_ep: bool | None) -> float:
    whole = Experiment(model=model, layout=Layout(pp=pp, tp=tp, dp_shard=ep, ep=ep))
    parameters = parameters_of_stage(engine, whole, stage=stage)
    return on_one_device(
        (p for p in parameters if by_ep is None or by_ep == (ep > 1 and is_split_by(EP, p))), whole.layout
    )


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


def on_one_device(parameters: Iterable[Parameter], layout: Layout) -> float:
    """Elements of these on one device of tp and ep: its part of those that are split, and all others."""
    degrees = ((p, [getattr(layout, axis) for axis in (TP, EP) if is_split_by(axis, p)]) for p in parameters)
    return sum(p.size / math.prod(split) for p, split in degrees)


def _fullest(engine: str, parameters: Iterable[Parameter], layout: Layout, *, is_split: bool) -> float:
    """Elements of these parameters on the device that has most."""
    cuts = ENGINES[engine].holds.cuts
    if cuts == "rows" and layout.zero == 1 and ENGINES[engine].sends_by == "pytorch" and is_split:
        held = [0] * layout.dp_shard  # ZeroRedundancyOptimizer gives whole parameters to whoever has least
        for parameter in sorted(parameters, key=lambda p: (not p.is_matrix, -p.size)):
            held[held.index(min(held))] += parameter.size
        return max(held)
    elements = 0.0
    for parameter in parameters:
        shards = shards_of(parameter, layout)
        parts = shards if is_split or cuts == "dims" else 1  # JAX pads what it does not split, too
        elements += parts // (shards if is_split else 1) * largest_part(parameter, cuts, layout, parts)
    return elements


def shards_of(parameter: Parameter, layout: Layout) -> int:
    """The parts that ZeRO makes of a device's part of a parameter."""
    return layout.axes[DP_SHARD] if is_split_by(EP, parameter) else layout.dp_shard


def largest_part(parameter: Parameter, cuts: str, layout: Layout, shards: int) -> float:
    """Elements of the largest of the parts that tp, ep, and within them ZeRO, make of a parameter."""
    split = [getattr(layout, SPLIT[axis]) if SPLIT.get(axis) in (TP, EP) else 1 for axis in parameter.axes]
    sizes = [-(-size // degree) for size, degree in zip(parameter.shape, split, strict=True)]
    elements = math.prod(sizes)
    if cuts == "flat":
        return elements / shards
    if cuts == "rows":  # nanoGPT's: a Linear's outputs
        inputs = input_dims(parameter)
        rows = sizes[0] if parameter.is_matrix and not inputs else math.prod(sizes[inputs:])
        return -(-rows // shards) * elements // rows
    if any(size % shards == 0 for size in sizes):
        return elements // shards
    padded = max([size for size, degree in zip(sizes, split, strict=True) if degree == 1] or sizes)
    return -(-padded // shards) * elements // padded


def padding_of_stage(engine: str, experiment: Experiment, *, stage: int) -> float:
    """How many times as large a stage's blocks, ends or token embedding are at most, if parts of tp and
    dp_shard are all as large as the largest: 1 if they are equal."""
    layout, cuts = experiment.layout, ENGINES[engine].holds.cuts
    block = list(block_parameters(experiment.model, 0))
    ends = [p for p in parameters_of_stage(engine, experiment, stage=stage) if p not in block]

    def padding(parameters: list[Parameter]) -> float:
        largest = sum(
            shards_of(p, layout) * largest_part(p, cuts, layout, shards_of(p, layout)) for p in parameters
        )
        return largest / on_one_device(parameters, layout)

    return max(padding(parameters) for parameters in (block, ends, ends[:1]) if parameters)


def is_split_by(axis: str, parameter: Parameter) -> bool:
    """True if a mesh axis splits it; false if every device along the axis has all of it."""
    return axis in map(SPLIT.get, parameter.axes)
