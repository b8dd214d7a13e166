"""Choice of engines that can do what is asked, and have room for it; others have a reason.

Where there is not room for parameters, moments and a batch or logits, nothing can run, and it is refused.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence

from compare.contract.record import ON_HOST
from compare.execute.launch import EnvironmentMissing, require_devices
from compare.execute.launchers import Hosts
from compare.execute.pythons import why_not_python
from compare.execute.this_machine import gpu_memories, memory_bytes
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.spec.engines.registry import ENGINES, SIDES
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited
from compare.terminal import human_bytes
from compare.theory.peak import peak_estimate

Choice = tuple[list[str], dict[str, str]]
"""Engines in their order; and why others are left out, by name."""
COMPUTE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BATCH_BYTES = 20  # of a token while `Corpus.batch` draws it: two int64 positions and one int32


def as_preset(engine: str, experiment: Experiment) -> Experiment:
    """The experiment as an engine has its preset: a composition with a pipeline under GPipe if it lacks 1F1B.

    Raises ExperimentError.
    """
    layout, able = experiment.layout, ENGINES[engine]
    only_data_parallel = layout.dp_replicate == layout.devices > 1
    if only_data_parallel and layout.gradient_sync != Layout().gradient_sync and not able.offers_choice:
        raise ExperimentError(f"the same as ddp: {engine} chooses for itself")
    is_composed, schedules = layout.devices > layout.pp > 1, able.layouts.schedules
    if is_composed and layout.schedule not in schedules and "gpipe" in schedules:
        return edited(experiment, {"layout": {"schedule": "gpipe"}})
    return experiment


def require_case(engine: str, experiment: Experiment, *, platform: str, hosts: Hosts) -> None:
    """Refuse a case before anything starts. Raises ExperimentError, EnvironmentMissing."""
    require_devices(experiment, platform, hosts)
    ENGINES[engine].require_experiment(experiment)
    require_memory(engine, experiment, platform=platform)


def require_sides(sides: Iterable[str], pythons: Mapping[str, str]) -> None:
    """Reject sides that this Python is to run and lacks. `checked_pythons` has tried other Pythons.

    Raises EnvironmentMissing.
    """
    for name in dict.fromkeys(sides):
        is_this = pythons.get(name, sys.executable) == sys.executable
        if is_this and (why := why_not_python(SIDES[name], sys.executable)):
            raise EnvironmentMissing(f"{name}: {why} with --{SIDES[name].python_flag}")


def fitting(engines: Sequence[str], layout: Layout) -> Choice:
    """Choose the engines that can do a layout. Raises ExperimentError: none can."""
    left_out = {}
    for engine in engines:
        try:
            ENGINES[engine].require(layout)
        except ExperimentError as error:
            left_out[engine] = str(error)
    if len(left_out) == len(engines):
        raise ExperimentError(f"no engine can do this: {'; '.join(dict.fromkeys(left_out.values()))}")
    return [engine for engine in engines if engine not in left_out], left_out


def require_memory(engine: str, experiment: Experiment, *, platform: str) -> None:
    """Refuse what cannot fit, whatever an engine does.

    That is less than the estimate: parameters, optimizer state, and beside them a batch as it is drawn, or
    the logits of one microbatch of one share of it. Devices of a CPU share the machine's memory; a GPU has
    its own, and the host draws weights and batches. Raises ExperimentError.
    """
    estimate = peak_estimate(engine, experiment)
    parameters, optimizer = estimate["parameters"], estimate["optimizer"]
    batch = {"one batch": float(BATCH_BYTES * experiment.tokens_per_step)}
    here = float(memory_bytes()), "this machine"
    if platform == "cpu":
        kept = sum(optimizer) + sum(estimate.get(ON_HOST, ()))
        held = {"parameters": sum(parameters), "optimizer state": kept}
        needs = [(held | batch, *here), (held | {"logits": _logits(experiment)}, *here)]
    else:
        drawn = parameter_count(experiment.model) * storage_dtype(experiment).itemsize
        first, second = max(zip(parameters, optimizer, strict=True), key=sum)
        state = {"parameters": first, "optimizer state": second}
        needs = [(batch, *here), ({"initial weights": float(drawn)}, *here)]
        needs += [(state, max(gpu_memories(), default=0) or math.inf, "a GPU here")]
    for parts, has, where in needs:
        if (size := sum(parts.values())) > has:
            words = " + ".join(f"{human_bytes(part)} of {name}" for name, part in parts.items())
            raise ExperimentError(
                f"{engine} would need {human_bytes(size)} ({words}), and {where} has {human_bytes(has)}: "
                f"make the model or the batch smaller"
            )


def _logits(experiment: Experiment) -> float:
    """Bytes of the logits of one microbatch, or a part of it, over all devices that share its work."""
    model, train, layout = experiment.model, experiment.train, experiment.layout
    sequences = train.batch_size / layout.data_parallel / layout.microbatches
    itemsize = COMPUTE_BYTES[experiment.precision.dtype]
    return itemsize * sequences * model.block_size // train.loss_chunks * model.vocab_size
