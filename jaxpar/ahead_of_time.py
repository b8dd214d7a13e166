"""A training step compiled for devices that are not here: nothing is placed, and nothing runs.

Every argument is a shape with a sharding over the devices of a `jax.experimental.topologies` description,
which XLA's TPU compiler (libtpu) and its GPU compiler (JAX's CUDA plugin) give without any such device.
"""

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Sharding

from compare.contract.absent import AbsentRequest, CompiledAhead, Compiler
from compare.contract.timing import Stopwatch
from compare.host.facts import MissingPackageError, versions
from compare.numerics.parameters import storage_dtype
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError
from jaxpar.comm.mesh import mesh_over
from jaxpar.configuration import PACKAGES
from jaxpar.measure.ledger import read_ledger
from jaxpar.measure.memory import planned_memory, resident_bytes
from jaxpar.optimizer import moments_like
from jaxpar.placement import Placement
from jaxpar.step import ShardedStep, TrainState, compile_step
from jaxpar.train import sharded_step

COMPILERS: dict[Compiler, str] = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin"}
"""The package that each comes with."""


def compile_step_ahead(request: AbsentRequest) -> CompiledAhead:
    """Compile the step of a layout for absent devices, and read what the compiler made of it.

    Raises ExperimentError or MissingPackageError: it cannot, in the compiler's words where it has some.
    """
    experiment, layout = request.experiment, request.experiment.layout
    ENGINES[request.engine].require(layout)
    if request.compiler == "tpu" and experiment.precision.dtype == "float64":
        raise ExperimentError("--compile: TPUs have no float64: choose another precision.dtype")
    devices = absent_devices(request.compiler, request.topology, request.target)
    if len(devices) != layout.devices:
        raise ExperimentError(
            f"--compile: {request.topology} has {len(devices)} devices, and the layout {layout.devices}"
        )
    mesh = mesh_over(devices, layout)
    clock = Stopwatch()
    with clock:
        sharded, optimizer = sharded_step(request.engine, experiment, mesh=mesh)
        state = _state_like(sharded, optimizer, experiment)
        try:
            step = compile_step(sharded, state, experiment)
        except jax.errors.JaxRuntimeError as error:  # it does not fit, or the chip has no such operation
            first = str(error).partition("\n")[0]
            raise ExperimentError(f"--compile: {request.topology}: {first}") from None
    analysis: Any = step.memory_analysis()
    return CompiledAhead(
        ledger=read_ledger(step.as_text() or "", mesh.shape),
        state_bytes=resident_bytes((state.params, state.opt_state), devices)[0],
        peak_bytes=analysis.peak_memory_in_bytes or planned_memory(step),
        compile_s=clock.cpu_s,
        device=devices[0].device_kind,
        versions=versions((*PACKAGES, COMPILERS[request.compiler])),
    )


def absent_devices(compiler: Compiler, topology: str, target: str = "") -> list[Any]:
    """The devices of a topology, in the compiler's order."""
    package = COMPILERS[compiler]
    if not list(importlib.metadata.distributions(name=package)):
        raise MissingPackageError(
            f"--compile: {package}, which compiles for what is not here, is not installed: "
            f"pip install 'shardpair[{compiler}-compiler]'"
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else it asks a cloud's metadata server who it is
    if compiler == "cuda":
        _find_ptxas()
    try:
        if compiler == "tpu":
            return list(topologies.get_topology_desc(topology, platform="tpu").devices)
        found = topologies.get_topology_desc("", platform="cuda", target_config=target, topology=topology)
        return list(found.devices)
    except Exception as error:  # jaxlib's own, of several kinds
        raise ExperimentError(f"--compile: {topology}: {' '.join(str(error).split())}") from None


def _find_ptxas() -> None:
    """Tell XLA where CUDA's assembler is that came with the compiler; before JAX starts any backend."""
    found = importlib.util.find_spec("nvidia")
    for folder in (Path(part) / "cu13" for part in (found.submodule_search_locations or [] if found else [])):
        if (folder / "bin" / "ptxas").is_file():
            os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={folder}"
            os.environ["XLA_FLAGS"] = flags.strip()


def _state_like(sharded: ShardedStep, optimizer: Any, experiment: Experiment) -> TrainState:
    """Weights and moments, which are alike, as shapes with shardings."""
    dtype = storage_dtype(experiment)

    def leaf(placement: Placement, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(placement.stored_shape, dtype, sharding=sharding)

    params, moment = (
        jax.tree.map(leaf, sharded.placements, where) for where in (sharded.params, sharded.moments)
    )
    return TrainState(params=params, opt_state=moments_like(optimizer, params, moment))
