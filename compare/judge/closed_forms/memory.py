"""Memory of a layout on each device between two steps, in closed form: the records are held against it.

    elements of a stage    its blocks / tp, where tp splits them; the first stage has both embeddings, the
                           last one the final norm and its own copy of the token embedding, the tied head
    parameters             / dp_shard from ZeRO-3 on; FSDP2's ZeRO-2 keeps shards between steps, too
    gradients              / dp_shard from ZeRO-2 on; torch-compiler has scattered ZeRO-1's, too
    optimizer              its moments, / dp_shard from ZeRO-1 on; none with offload, but as much on the host

Sources: ZeRO (Rajbhandari et al., arXiv 1910.02054); Megatron (arXiv 1909.08053), whose row biases and norms
every device of tp repeats.
"""

import functools
from collections.abc import Callable, Iterable, Mapping

from compare.contract.record import ON_HOST
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import Parameter, block_parameters, end_parameters, storage_dtype
from compare.spec.axes import SPLIT, TP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, Layout, Model

KINDS = ("parameters", "gradients", "optimizer")


def closed_form(engine: str, experiment: Experiment) -> dict[str, list[float]]:
    """Bytes at rest by kind, for each device in the order of the mesh."""
    return by_device(state_of_stage, engine, experiment)


def by_device(
    bytes_of_stage: Callable[..., dict[str, float]], engine: str, experiment: Experiment
) -> dict[str, list[float]]:
    """Bytes by kind of every device in the order of the mesh, from those of each rank of the pipeline."""
    layout = experiment.layout
    of_stage = [bytes_of_stage(engine, experiment, stage=stage) for stage in range(layout.pp)]
    stages = [layout.stage_of(device) for device in range(layout.devices)]
    return {kind: [of_stage[stage][kind] for stage in stages] for kind in of_stage[0]}


def state_of_stage(engine: str, experiment: Experiment, *, stage: int) -> dict[str, float]:
    """Bytes at rest by kind on each device of one rank of the pipeline."""
    layout = experiment.layout
    copies = {"parameters": 1, "gradients": 1, "optimizer": len(moment_names(experiment.optimizer))}
    split_from = ENGINES[engine].holds.sharded_from
    whole = storage_dtype(experiment).itemsize * elements_of_stage(engine, experiment, stage=stage)
    held = {
        kind: copies[kind] * whole / (layout.dp_shard if layout.zero >= split_from[kind] else 1)
        for kind in KINDS
    }
    if layout.offload == "optimizer":
        held |= {ON_HOST: held["optimizer"], "optimizer": 0.0}
    return held


def excess(measured: Mapping[str, list[int]], expected: Mapping[str, list[float]]) -> float:
    """Distance of the device that is furthest from the closed form, as a fraction of it; 0.05 is 5 %.

    A device may hold less than its share where shards cannot all be equal: then another holds more.
    All devices together are held to it both ways.
    """
    worst = 0.0
    for kind, wanted in expected.items():
        found = measured.get(kind) or [0] * len(wanted)
        if not any(wanted):
            worst = max(worst, float(any(found)))
            continue
        whole = sum(found) / sum(wanted) - 1
        each = max(got / want - 1 for got, want in zip(found, wanted, strict=True))
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
    (token, position), final_norm = end_parameters(model)
    everywhere = ENGINES[engine].holds.ends_on_every_stage
    first, last = everywhere or stage == 0, everywhere or stage == layout.pp - 1
    held = [token] if first or last else []
    held += [position] if first else []
    held += model.n_layer // layout.pp * list(block_parameters(model, 0))
    return held + (final_norm if last else [])


def on_one_of_tp(parameters: Iterable[Parameter], layout: Layout) -> float:
    """Elements of these parameters on one device of tp: its part of those that are split, and all others."""
    return sum(p.size / (layout.tp if is_split_by_tp(p) else 1) for p in parameters)


def is_split_by_tp(parameter: Parameter) -> bool:
    """True if tensor parallelism splits it; false if every device of tp has all of it."""
    return TP in map(SPLIT.get, parameter.axes)
