"""What a side says of a step on devices that are not here: XLA's compilers, and one rank of PyTorch alone."""

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from compare.contract.absent import AbsentRequest, CompiledAhead, RankAlone
from compare.execute.ask import ask
from compare.plan.machine import Machine
from compare.spec.axes import SHARDED_FROM
from compare.spec.engines.registry import ENGINES, JAX, TORCH, side_of
from compare.spec.experiment import Experiment, ExperimentError, edited

TIMEOUT_S = 3600.0
T = TypeVar("T", CompiledAhead, RankAlone)


def compile_ahead(engine: str, experiment: Experiment, machine: Machine, python: str) -> CompiledAhead:
    """What XLA makes of a step for a machine that need not be here; it takes minutes.

    Raises ExperimentError or EnvironmentMissing: no compiler for it, or no such topology, in its own words.
    """
    if (side := side_of(engine).name) != JAX.name:
        raise ExperimentError(f"--compile: {engine} is of {side}: give --alone")
    request = AbsentRequest(
        engine=engine,
        experiment=experiment,
        compiler="tpu" if machine.tpu else "cuda",
        topology=topology_of(machine),
        target=machine.gpu_target,
    )
    return _asked("--compile", request, python, CompiledAhead)


def run_alone(engine: str, experiment: Experiment, python: str) -> RankAlone:
    """A step of a layout's first rank, run here without the others; nothing is computed.

    Raises ExperimentError: no rank of this engine and layout can run by itself.
    """
    layout = experiment.layout
    if layout.devices == 1:
        raise ExperimentError("--alone: one device has no others")
    if side_of(engine).name != TORCH.name:
        raise ExperimentError(
            f"--alone: {engine} is one program for all devices: choose an engine of {TORCH.name}, whose "
            f"ranks are processes"
        )
    by_ddp = layout.tp == 1 and layout.data_parallel > 1 and layout.zero < SHARDED_FROM["gradients"]
    if ENGINES[engine].sends_by == "pytorch" and (layout.pp > 1 or by_ddp):
        waits = "PyTorch's pipeline" if layout.pp > 1 else "DistributedDataParallel"
        raise ExperimentError(
            f"--alone: {engine}: {waits} waits for answers, which ranks that are not there do not give: "
            f"choose torch-manual, or fully sharded layouts"
        )
    return _asked("--alone", AbsentRequest(engine=engine, experiment=experiment), python, RankAlone)


def topology_of(machine: Machine) -> str:
    """Its devices as a compiler names them: v5e:16x16, v5p:4x4x4; 1x8x8 for eight hosts of eight GPUs.

    Raises ExperimentError: it names no chip to XLA, or no slice that is sold.
    """
    devices, inside = machine.devices, machine.devices_inside
    if not machine.tpu:
        if not machine.gpu_target:
            raise ExperimentError(f"--compile: {machine.name} has no tpu or gpu_target, its name to XLA")
        return f"1x{machine.hosts}x{devices // machine.hosts}"
    if devices > inside or devices & (devices - 1):
        raise ExperimentError(
            f"--compile: {devices} chips are no slice of a pod of {machine.tpu}: give a power of two up to "
            f"{inside}"
        )
    doublings = devices.bit_length() - 1
    sides = [1 << ((doublings + dim) // machine.torus) for dim in range(machine.torus)]
    return f"{machine.tpu}:{'x'.join(map(str, sides))}"


def _asked(flag: str, request: AbsentRequest, python: str, answer: type[T]) -> T:
    side, made_up = side_of(request.engine), {"data": {"source": "synthetic"}}  # no number is computed
    request = replace(request, experiment=edited(request.experiment, made_up))
    question = [flag, msgspec.json.encode(request).decode()]
    return ask(side.name, python, question, answer=answer, timeout_s=TIMEOUT_S)
