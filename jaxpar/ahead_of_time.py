"""A training step compiled for chips that are not here. Nothing is placed on a device, and nothing runs.

XLA's compilers for TPUs (libtpu) and for GPUs (JAX's CUDA plugin) need only a description of the chips. A
compiled program is kept in a file, which is named after its text before compilation.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from msgspec import Struct

from compare.contract.chips import Chip, ChipProgram, ChipRequest
from compare.contract.timing import Stopwatch
from compare.numerics.parameters import storage_dtype
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError, one_line
from compare.system.facts import versions
from compare.system.json_files import read_json, write_json
from jaxpar import PACKAGES
from jaxpar.comm.mesh import device_kind, find_devices, mesh_over
from jaxpar.configuration import configure_products, join_devices
from jaxpar.engine import Engine
from jaxpar.measure.ledger import read_ledger
from jaxpar.measure.memory import planned_memory, resident_bytes
from jaxpar.programs import TrainState, compile_lowered, trace_train
from jaxpar.train import make_engine

COMPILERS = {"tpu": ("libtpu", "tpu"), "cuda": ("jax-cuda13-plugin", "gpu-compiler")}
"""Compiler -> its package, and the extra of shardpair that installs it."""


class Compiled(Struct, frozen=True, kw_only=True):
    """A compiled program, as it is kept."""

    text: str
    peak_bytes: int
    compile_s: float


def compile_ahead(request: ChipRequest) -> ChipProgram:
    """Compile the step of an engine for a chip, and read the ledger of the program.

    Raises ImportError: the compiler is not installed; ExperimentError: the compiler rejects the chip or the
    program.
    """
    experiment, chip = request.experiment, request.chip
    ENGINES[request.engine].require_experiment(experiment)
    configure_products("cpu", experiment.precision.product_dtype)
    if chip.compiler == "cpu":
        join_devices("cpu", experiment.layout.devices, None, timeout_s=0.0)
        devices = find_devices(experiment.layout.devices, platform="cpu")
    else:
        devices = absent_devices(chip)
    if len(devices) != experiment.layout.devices:
        raise ExperimentError(
            f"--chip {chip.name} has {len(devices)} devices, and the layout {experiment.layout.devices}"
        )
    engine = make_engine(request.engine, experiment, mesh_over(devices, experiment.layout))
    state = state_like(engine)
    lowered = trace_train(engine, state).lower()
    found = versions((*PACKAGES, *COMPILERS.get(chip.compiler, ())[:1]))
    path = None
    if request.cache_dir:
        # The text has no scopes and no source lines, which the ledger reads: the source stands for them.
        source = [file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))]
        parts = lowered.as_text(), source, chip, engine.compiler_options, found
        path = Path(request.cache_dir) / "chips" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.json"
    is_cached = path is not None and path.is_file()
    compiled = read_json(path, Compiled) if path and is_cached else compile_text(engine, lowered, chip)
    if path and not is_cached:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, compiled)
    return ChipProgram(
        ledger=read_ledger(compiled.text, engine.mesh.shape),
        state_bytes=resident_bytes((state.params, state.opt_state), devices)[0],
        peak_bytes=compiled.peak_bytes,
        compile_s=compiled.compile_s,
        is_cached=is_cached,
        device=device_kind(devices[0]),
        versions=found,
    )


def compile_text(engine: Engine, lowered: Any, chip: Chip) -> Compiled:
    """Compile a lowered step. Raises ExperimentError: with the compiler's reason."""
    clock = Stopwatch()
    with clock:
        try:
            step = compile_lowered(engine, lowered)
        except jax.errors.JaxRuntimeError as error:  # it does not fit, or the chip lacks an operation
            raise ExperimentError(f"--chip {chip.name}: {one_line(error)[:400]}") from None
    analysis: Any = step.memory_analysis()
    return Compiled(
        text=step.as_text() or "",
        # XLA:CPU reports no peak of a program with temporaries.
        peak_bytes=planned_memory(step) if chip.compiler == "cpu" else analysis.peak_memory_in_bytes,
        compile_s=clock.cpu_s,
    )


def absent_devices(chip: Chip) -> list[jax.Device]:
    """The devices of a chip in the compiler's order.

    Raises ImportError: the compiler is not installed; ExperimentError: it knows no such devices.
    """
    package, extra = COMPILERS[chip.compiler]
    if not list(importlib.metadata.distributions(name=package)):
        raise ImportError(
            f"--chip {chip.name}: the compiler ({package}) is not installed: pip install 'shardpair[{extra}]'"
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # otherwise libtpu asks the metadata server of a cloud
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device is used, so there is nothing to lock
    if chip.compiler == "cuda":
        find_ptxas()
    options = {"target_config": chip.target, "topology": chip.topology} if chip.target else {}
    try:
        name = "" if chip.target else chip.topology
        return list(topologies.get_topology_desc(name, platform=chip.compiler, **options).devices)
    except Exception as error:  # of jaxlib, of several types
        raise ExperimentError(f"--chip {chip.name}: {one_line(error)[:400]}") from None


def find_ptxas() -> None:
    """Give XLA the folder of CUDA's assembler, which pip installed. JAX has started no backend yet."""
    found = importlib.util.find_spec("nvidia")
    for folder in (Path(part) / "cu13" for part in (found.submodule_search_locations or [] if found else [])):
        if (folder / "bin" / "ptxas").is_file():
            os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={folder}"
            os.environ["XLA_FLAGS"] = flags.strip()


def state_like(engine: Engine) -> TrainState:
    """Parameters and moments as shapes with shardings."""
    dtype, where = storage_dtype(engine.experiment), engine.shardings
    params = jax.tree.map(
        lambda placement, sharding: jax.ShapeDtypeStruct(placement.padded_shape, dtype, sharding=sharding),
        engine.placements,
        where.params,
    )
    opt_state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(engine.optimizer.init, params),
        where.opt_state,
    )
    return TrainState(params=params, opt_state=opt_state)
