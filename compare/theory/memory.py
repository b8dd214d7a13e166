"""Bytes on each device between two steps, in closed form.

    elements of a stage    its blocks / tp, where tp splits them; experts / ep. The first stage has both
                           embeddings, the last one the final norm and its own copy of the tied head
    parameters             / dp_shard from ZeRO-3 on (FSDP2: from ZeRO-2 on)
    gradients              / dp_shard from ZeRO-2 on (torch-compiler: from ZeRO-1 on)
    optimizer              its moments, / dp_shard from ZeRO-1 on; with offload on the host instead

These are equal shares. If a dim is not divisible, the fullest device holds more (`rounds_up`).

Sources: ZeRO (Rajbhandari et al., arXiv 1910.02054); Megatron (arXiv 1909.08053), where every device of tp
replicates norms and the biases of row-parallel layers.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping

from compare.contract.record import ON_HOST
from compare.formats.gpt2_names import input_dims
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import (
    Parameter,
    block_parameters,
    end_parameters,
    parameter_count,
    storage_dtype,
)
from compare.spec.axes import DP_SHARD, EP, PP, SPLIT, TP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, Layout, Model

KINDS = ("parameters", "gradients", "optimizer")
STEP_BYTES = 4
"""Bytes of the step count that PyTorch's AdamW keeps for each parameter."""


def bytes_at_rest(engine: str, experiment: Experiment, *, rounds_up: bool = False) -> dict[str, list[float]]:
    """Bytes at rest by kind, for each device in the order of the mesh.

    With `rounds_up` an upper bound for the fullest device, from the way in which the engine cuts parameters.
    """
    return by_device(state_of_stage, engine, experiment, rounds_up=rounds_up)


def by_device(
    bytes_of_stage: Callable[..., dict[str, float]], engine: str, experiment: Experiment, **how: bool
) -> dict[str, list[float]]:
    """Bytes by kind for each device in the order of the mesh, from the bytes of each stage."""
    layout = experiment.layout
    of_stage = [bytes_of_stage(engine, experiment, stage=stage, **how) for stage in range(layout.pp)]
    stages = [layout.coordinates(device)[PP] for device in range(layout.devices)]
    return {kind: [of_stage[stage][kind] for stage in stages] for kind in of_stage[0]}


def state_of_stage(
    engine: str, experiment: Experiment, *, stage: int, rounds_up: bool = False
) -> dict[str, float]:
    """Bytes at rest by kind on each device of one stage."""
    layout, able = experiment.layout, ENGINES[engine]
    parameters = parameters_of_stage(engine, experiment, stage=stage)
    state, moments = {}, len(moment_names(experiment.optimizer))
    for kind, copies in zip(KINDS, (1, 1, moments), strict=True):
        is_split = layout.zero >= able.sharded_from[kind]
        elements = elements_of_stage(engine, experiment, stage=stage, sharded=is_split)
        if rounds_up:
            elements = _fullest(engine, parameters, layout, is_split=is_split)
        state[kind] = copies * storage_dtype(experiment).itemsize * elements
    if rounds_up and moments and not able.is_jax:
        state["optimizer"] += STEP_BYTES * len(parameters)
    if layout.offload == "optimizer":
        state |= {ON_HOST: state["optimizer"], "optimizer": 0.0}
    return state


def checkpoint_bytes(experiment: Experiment) -> int:
    """Most bytes of the checkpoints that a training leaves: the newest ones and the best one."""
    every, train = experiment.checkpoint.every, experiment.train
    if not every:
        return 0
    kept = min(-(-train.max_iters // every), experiment.checkpoint.keep + bool(train.eval_interval))
    copies = 1 + len(moment_names(experiment.optimizer))
    return kept * copies * weight_bytes(experiment)


def weight_bytes(experiment: Experiment) -> int:
    """Bytes of the whole model's weights."""
    return storage_dtype(experiment).itemsize * parameter_count(experiment.model)


def excess(
    measured: Mapping[str, list[int]],
    expected: Mapping[str, list[float]],
    most: Mapping[str, list[float]] | None = None,
) -> float:
    """Largest distance of a measurement from the closed form, as a fraction of it; 0.05 is 5 %.

    No device may hold more than the fullest (`most`; its equal share by default), and all devices together
    not less than their shares: one device may hold less if another holds more.
    """
    worst = 0.0
    for kind, shares in expected.items():
        found = measured.get(kind) or [0] * len(shares)
        if not any(shares):
            worst = max(worst, float(any(found)))
            continue
        total = min(sum(found) / sum(shares) - 1, 0.0)
        limits = (most or expected)[kind]
        each = max(0.0, *(size / limit - 1 for size, limit in zip(found, limits, strict=True)))
        worst = max((worst, total, each), key=abs)
    return worst


def elements_of_stage(
    engine: str, experiment: Experiment, *, stage: int, sharded: bool = False, by_ep: bool | None = None
) -> float:
    """Parameters of one stage on one device of tp and ep; with `sharded` the equal share of dp_shard.

    All parameters, or those that ep splits (`by_ep`), or those that it does not split. The ranks of ep are a
    part of dp_shard, so an expert's share of dp_shard is as large as any other parameter's.
    """
    layout, model = experiment.layout, experiment.model
    ep = 1 if sharded and by_ep is None else layout.ep
    elements = _elements(engine, model, layout.pp, layout.tp, ep, stage, by_ep)
    return elements / (layout.axes[DP_SHARD] if by_ep else layout.dp_shard) if sharded else elements


@functools.lru_cache(maxsize=1024)
def _elements(engine: str, model: Model, pp: int, tp: int, ep: int, stage: int, by_ep: bool | None) -> float:
    alone = Experiment(model=model, layout=Layout(pp=pp, tp=tp, dp_shard=ep, ep=ep))
    parameters = parameters_of_stage(engine, alone, stage=stage)
    return on_one_device(
        (p for p in parameters if by_ep is None or by_ep == (ep > 1 and is_split_by(EP, p))), alone.layout
    )


def parameters_of_stage(engine: str, experiment: Experiment, *, stage: int) -> tuple[Parameter, ...]:
    """Parameters of one rank of a pipeline in canonical order; all blocks have the names of the first."""
    layout, is_jax = experiment.layout, ENGINES[engine].is_jax
    first, last = is_jax or stage == 0, is_jax or stage == layout.pp - 1
    return _parameters_of_stage(experiment.model, layout.pp, first, last)


@functools.lru_cache(maxsize=256)
def _parameters_of_stage(model: Model, pp: int, first: bool, last: bool) -> tuple[Parameter, ...]:
    (token, *positions), final_norm = end_parameters(model)
    return (
        *((token,) if first or last else ()),
        *(positions if first else ()),
        *(model.n_layer // pp * block_parameters(model, 0)),
        *(final_norm if last else ()),
    )


def on_one_device(parameters: Iterable[Parameter], layout: Layout) -> float:
    """Elements of parameters on one device of tp and ep."""
    return sum(p.size / _split_of(p.axes, layout.tp, layout.ep) for p in parameters)


@functools.lru_cache(maxsize=1024)
def _split_of(axes: tuple[str, ...], tp: int, ep: int) -> int:
    """Number of devices of tp and ep that split a parameter with these axes."""
    split = [*map(SPLIT.get, axes)]
    return (tp if TP in split else 1) * (ep if EP in split else 1)


def _fullest(engine: str, parameters: Iterable[Parameter], layout: Layout, *, is_split: bool) -> float:
    """Upper bound of the elements of parameters on one device."""
    able = ENGINES[engine]
    if able.sends_by == "pytorch" and layout.zero == 1 and is_split:
        # ZeroRedundancyOptimizer assigns each parameter to the device that has least.
        sizes = [parameter.size for parameter in parameters]
        return sum(sizes) / layout.dp_shard + max(sizes)
    elements = 0.0
    for parameter in parameters:
        shards = _shards(parameter, layout)
        pads = is_split or able.is_jax  # JAX also pads parameters that it does not split
        padded = padded_size(parameter, able.cuts, layout, shards if pads else 1)
        elements += padded / shards if is_split else padded
    return elements


def _shards(parameter: Parameter, layout: Layout) -> int:
    return layout.axes[DP_SHARD] if is_split_by(EP, parameter) else layout.dp_shard


def padded_size(parameter: Parameter, cuts: str, layout: Layout, shards: int) -> float:
    """Elements of a parameter on one device of tp and ep, rounded up for `shards` equal shards.

    A dim that tp or ep splits is rounded up to equal parts, and then the unit that ZeRO cuts (`Engine.cuts`).
    """
    degrees = [getattr(layout, SPLIT[axis]) if SPLIT.get(axis) in (TP, EP) else 1 for axis in parameter.axes]
    sizes = [-(-size // degree) for size, degree in zip(parameter.shape, degrees, strict=True)]
    elements = float(math.prod(sizes))
    if cuts == "flat" or (cuts == "dims" and any(size % shards == 0 for size in sizes)):
        return elements
    if cuts == "dims":
        rows = max([size for size, degree in zip(sizes, degrees, strict=True) if degree == 1] or sizes)
    else:  # nanoGPT's rows: a Linear's outputs
        inputs = input_dims(parameter)
        rows = math.prod(sizes[inputs:]) if inputs or not parameter.is_matrix else sizes[0]
    return shards * -(-rows // shards) * elements / rows


def padding(engine: str, experiment: Experiment, *, stage: int = 0) -> float:
    """Factor by which rounding up may enlarge a parameter's messages; 1 if all dims are divisible."""
    layout, cuts = experiment.layout, ENGINES[engine].cuts
    parameters = dict.fromkeys(parameters_of_stage(engine, experiment, stage=stage))
    return max(
        padded_size(p, cuts, layout, _shards(p, layout)) / on_one_device([p], layout) for p in parameters
    )


def is_split_by(axis: str, parameter: Parameter) -> bool:
    """True if a mesh axis splits the parameter; False if each of its devices holds all of it."""
    return axis in map(SPLIT.get, parameter.axes)
