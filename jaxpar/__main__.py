"""`python -m jaxpar RUN_DIR`: read RUN_DIR/request.json, train, leave a record in RUN_DIR.

Exit codes: 0 done; 1 the run failed; 2 a bad request or experiment; 3 this machine lacks what it needs.
Other than 0, RUN_DIR/error.json says why.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from compare.contract.experiment import MAX_CPU_DEVICES, Experiment, ExperimentError, revalidate
from compare.contract.record import REQUEST, Failure, Recorder, Request, read_json, write_failure

DONE, FAILED, BAD_REQUEST, MISSING = 0, 1, 2, 3


def main() -> int:
    """Run, and return the exit code."""
    # Python runs its own Ctrl-C handler only when XLA's C++ returns, which a compilation does not do soon.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = _parse_arguments()
    if arguments.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    if arguments.doctor:
        print(json.dumps(doctor()))
        return DONE
    return run(arguments.run_dir)


def run(folder: Path) -> int:
    """Train what folder/request.json asks for; every failure ends as one line, error.json and a code."""
    try:
        request = read_request(folder)
        configure_jax(request)
        # Imported after configuring: a backend, once started, keeps its devices and platform.
        from jaxpar.faults import planted
        from jaxpar.mesh import MissingDevicesError
        from jaxpar.train import train

        try:
            with planted(request.fault, engine=request.engine):
                train(request, Recorder(folder), progress=lambda: _watch(request.timeout_s))
        except MissingDevicesError as error:
            return _fail(folder, error, MISSING)
    except ExperimentError as error:
        return _fail(folder, error, BAD_REQUEST)
    except ImportError as error:
        return _fail(folder, error, MISSING)
    except Exception as error:
        return _fail(folder, error, FAILED)
    return DONE


def read_request(folder: Path) -> Request:
    """The request in a folder, its experiment checked again. Raises ExperimentError."""
    try:
        request = read_json(folder / REQUEST, Request)
    except (OSError, msgspec.DecodeError) as error:
        raise ExperimentError(f"{folder / REQUEST}: {' '.join(str(error).split())}") from None
    revalidate(request.experiment)
    return request


def configure_jax(request: Request) -> None:
    """Everything that has to be set before JAX starts a backend."""
    import jax

    experiment: Experiment = request.experiment
    jax.config.update("jax_platforms", "cuda,cpu" if request.platform == "gpu" else "cpu")
    if request.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", experiment.layout.devices)
    jax.config.update("jax_enable_x64", experiment.precision.dtype == "float64")
    # On NVIDIA GPUs JAX's default for float32 products is TF32.
    tf32 = experiment.precision.tf32
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if tf32 else "highest")
    if request.cache_dir:
        jax.config.update("jax_compilation_cache_dir", request.cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _watch(request.timeout_s)


def doctor() -> dict[str, object]:
    """Versions and devices that this side finds here."""
    import jax

    from jaxpar.measure import versions
    from jaxpar.mesh import cores

    try:
        gpus = [device.device_kind for device in jax.devices("gpu")]
    except RuntimeError:
        gpus = []
    cpu_devices = f"up to {MAX_CPU_DEVICES} virtual devices in one process, on {cores()} cores"
    return {"versions": versions(), "cpu_devices": cpu_devices, "gpus": gpus}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxpar", description="Train one experiment with JAX.")
    parser.add_argument("run_dir", nargs="?", type=Path, help="folder with request.json")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--doctor", action="store_true", help="print versions and devices as JSON")
    arguments = parser.parse_args()
    if not arguments.doctor and arguments.run_dir is None:
        parser.error("RUN_DIR is missing")
    return arguments


def _watch(timeout_s: float) -> None:
    """(Re)start the clock that ends a hang. It runs in C: a collective that waits holds Python still."""
    faulthandler.dump_traceback_later(timeout_s, exit=True)


def _fail(folder: Path, error: Exception, code: int) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    if code == FAILED:
        traceback.print_exc()
        message = f"{type(error).__name__}: {message}"
    print(f"jaxpar: {message}", file=sys.stderr)
    if folder.is_dir():
        write_failure(folder, Failure(message=message, traceback=traceback.format_exc()))
    return code


def _exit_with_stdin() -> None:
    """End at once when standard input ends: the launcher is gone. JAX's devices are threads of ours."""
    while os.read(0, 4096):
        pass
    os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
