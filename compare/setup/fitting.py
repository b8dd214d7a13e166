"""Engines that can run an experiment, and machines that have room for it."""

import math
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from compare.contract.record import ON_HOST
from compare.contract.request import Request, Rung, rungs_asked_for
from compare.execute.launch import EnvironmentMissing, require_devices
from compare.execute.launchers import Hosts
from compare.execute.pythons import why_not_python
from compare.execute.this_machine import gpu_memories, memory_bytes
from compare.show.findings import by_reason
from compare.spec.engines.registry import ENGINES, SIDES
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited
from compare.spec.xla import xla_options
from compare.text import human_bytes
from compare.theory.memory import checkpoint_bytes, weight_bytes
from compare.theory.peak import peak_estimate

COMPUTE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
BATCH_BYTES = 20  # of a token while `Corpus.batch` draws it: two int64 positions and one int32


def as_preset(engine: str, experiment: Experiment) -> Experiment:
    """The experiment with the preset's layout for an engine: with GPipe if the engine lacks 1F1B.

    Applies to pipelines that are combined with other axes. Raises ExperimentError: the layout is data
    parallel with a gradient synchronisation that the engine cannot choose.
    """
    layout, able = experiment.layout, ENGINES[engine]
    only_data_parallel = layout.dp_replicate == layout.devices > 1
    if only_data_parallel and layout.gradient_sync != Layout().gradient_sync and not able.offers_choice:
        raise ExperimentError(f"the same as ddp: {engine} chooses its gradient synchronisation itself")
    is_composed, schedules = layout.devices > layout.pp > 1, able.layouts.schedules
    if is_composed and layout.schedule not in schedules and "gpipe" in schedules:
        return edited(experiment, {"layout": {"schedule": "gpipe"}})
    return experiment


def fitting(engines: Sequence[str], experiment: Experiment) -> tuple[list[str], dict[str, str]]:
    """The engines that can run a layout, and reasons for the others. Raises ExperimentError: none can."""
    left_out = {engine: why for engine in engines if (why := ENGINES[engine].why_not_train(experiment))}
    if len(left_out) == len(engines):
        reasons = [f"{', '.join(names)}: {why}" for why, names in by_reason(left_out).items()]
        raise ExperimentError(f"no engine can run this layout: {'; '.join(reasons)}")
    return [engine for engine in engines if engine not in left_out], left_out


def require_sides(sides: Iterable[str], pythons: Mapping[str, str]) -> None:
    """Reject sides that this Python is to run and lacks. `find_pythons` has tried other Pythons.

    Raises EnvironmentMissing.
    """
    for name in dict.fromkeys(sides):
        is_this = pythons.get(name, sys.executable) == sys.executable
        if is_this and (why := why_not_python(SIDES[name], sys.executable)):
            raise EnvironmentMissing(f"{name}: {why} with --{SIDES[name].python_flag}")


def require_case(engine: str, experiment: Experiment, *, platform: str, hosts: Hosts) -> None:
    """Reject a case that cannot run here. Raises ExperimentError, EnvironmentMissing."""
    if xla_options(experiment.layout) and platform == "cpu":
        raise ExperimentError(
            f"layout.xla = {experiment.layout.xla} with platform cpu: it sets options of XLA's GPU compiler: "
            "leave it out, or give --platform gpu"
        )
    require_devices(experiment, platform, hosts)
    require_kernel(engine, experiment, platform=platform)
    ENGINES[engine].require_experiment(experiment)
    if platform == "gpu":
        require_free_queues(engine, experiment.layout, os.environ)
    if not hosts.elsewhere:
        require_memory(engine, experiment, platform=platform)


def require_free_queues(engine: str, layout: Layout, environment: Mapping[str, str]) -> None:
    """Reject variables of CUDA with which a pipeline of PyTorch hangs. Raises ExperimentError."""
    for name in ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        if layout.pp > 1 and not ENGINES[engine].is_jax and environment.get(name) == "1":
            raise ExperimentError(
                f"{engine}: {name} = 1 with layout.pp = {layout.pp}: a pipeline waits for a message before "
                f"it sends the one that causes it, and would hang: unset {name}"
            )


def require_kernel(engine: str, experiment: Experiment, *, platform: str) -> None:
    """Reject a core of attention that an engine lacks on a platform. Raises ExperimentError."""
    core, dtype, layout = experiment.model.attention, experiment.precision.dtype, experiment.layout
    if core == "fused" and platform == "cpu":
        raise ExperimentError(
            "model.attention = fused with --platform cpu: fused kernels are for GPUs: add --platform gpu, or "
            "set model.attention = blockwise"
        )
    is_ring = layout.cp > 1 and layout.context == "ring"  # computes its blocks by products
    has_kernels = ENGINES[engine].is_jax or is_ring or platform == "cpu"
    if core == "blockwise" and dtype == "float64" and not has_kernels:
        raise ExperimentError(
            f"{engine}: model.attention = blockwise with precision.dtype = float64 and --platform gpu: "
            "PyTorch's fused kernels for GPUs lack float64: set model.attention = dense or auto"
        )


def require_disk(requests: Collection[Request], folder: Path) -> None:
    """Reject requests whose compared tensors and checkpoints do not fit on the disk of a folder.

    The folder need not exist. Raises ExperimentError.
    """
    folder = folder.absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    small = {Rung.BATCH, Rung.ROUTING}
    sizes = {
        "compared tensors": sum(
            len({*rungs_asked_for(one)} - small) * weight_bytes(one.experiment) for one in requests
        ),
        "checkpoints": sum(checkpoint_bytes(one.experiment) for one in requests),
    }
    if sum(sizes.values()) > free:
        words = " + ".join(f"{human_bytes(size)} of {name}" for name, size in sizes.items() if size)
        raise ExperimentError(
            f"{folder} would need {words}, and {human_bytes(free)} are free: give a --run_dir on a larger "
            f"disk, or compare or save less with --no_ladder or --checkpoint.keep"
        )


def require_memory(engine: str, experiment: Experiment, *, platform: str) -> None:
    """Reject an experiment that no engine has room for. Raises ExperimentError.

    Counted are parameters, optimizer state, and one batch or the logits of one microbatch: less than the
    estimate. Devices of a CPU share the machine's memory. A GPU has its own; weights and batches are drawn on
    the host.
    """
    estimate = peak_estimate(engine, experiment)
    parameters, optimizer = estimate["parameters"], estimate["optimizer"]
    batch = {"one batch": float(BATCH_BYTES * experiment.tokens_per_step)}
    here = float(memory_bytes()), "this machine"
    if platform == "cpu":
        moments = sum(optimizer) + sum(estimate.get(ON_HOST, ()))
        state = {"parameters": sum(parameters), "optimizer state": moments}
        needs = [(state | batch, *here), (state | {"logits": _logits(experiment)}, *here)]
    else:
        drawn = weight_bytes(experiment)
        first, second = max(zip(parameters, optimizer, strict=True), key=sum)
        state = {"parameters": first, "optimizer state": second}
        needs = [(batch, *here), ({"initial weights": float(drawn)}, *here)]
        needs += [(state, max(gpu_memories(), default=0) or math.inf, "a GPU here")]
    for sizes, memory, where in needs:
        if (total := sum(sizes.values())) > memory:
            words = " + ".join(f"{human_bytes(size)} of {name}" for name, size in sizes.items())
            raise ExperimentError(
                f"{engine} would need {human_bytes(total)} ({words}), and {where} has {human_bytes(memory)}: "
                f"make the model or the batch smaller"
            )


def _logits(experiment: Experiment) -> float:
    """Bytes of the logits of one microbatch, or of a chunk of it, on all devices that share its work."""
    model, train, layout = experiment.model, experiment.train, experiment.layout
    sequences = train.batch_size / layout.data_parallel / layout.microbatches
    itemsize = COMPUTE_BYTES[experiment.precision.dtype]
    return itemsize * sequences * model.block_size // train.loss_chunks * model.vocab_size
