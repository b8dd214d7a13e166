"""What `python -m jaxpar --WORD` answers with one line of JSON, instead of training.

JAX is configured before what uses it is imported: a backend, once started, keeps its devices and platform.
"""

import json
from argparse import Namespace
from pathlib import Path

import jax
import msgspec

from compare.checkpoint.description import DESCRIPTION
from compare.checkpoint.reader import read_description
from compare.contract.absent import read_absent_request
from compare.contract.ceiling import read_ceiling_request
from compare.host.facts import cores, versions
from compare.numerics.parameters import storage_dtype
from compare.numerics.sampling import read_sample_request
from compare.spec.experiment import MAX_CPU_DEVICES
from jaxpar.configuration import PACKAGES, configure_products


def answer(arguments: Namespace) -> None:
    """Answer on standard output. Raises ExperimentError, MissingDevicesError, MissingPackageError."""
    if arguments.convert:
        convert(*arguments.convert)
    elif arguments.ceiling:
        request = read_ceiling_request(arguments.ceiling)
        configure_products(request.platform, request.dtype)
        from jaxpar.measure.bench import measure_ceiling

        print(msgspec.json.encode(measure_ceiling(request)).decode())
    elif arguments.compile:
        ahead = read_absent_request("--compile", arguments.compile)
        configure_products("cpu", ahead.experiment.precision.product_dtype)
        from jaxpar.ahead_of_time import compile_step_ahead

        print(msgspec.json.encode(compile_step_ahead(ahead)).decode())
    elif arguments.sample:
        drawn = read_sample_request(arguments.sample)
        saved = read_description(Path(drawn.checkpoint)).experiment
        configure_products("cpu", str(storage_dtype(saved)))
        from jaxpar.sample import sample

        print(json.dumps(sample(drawn)))
    else:
        print(json.dumps(doctor()))


def convert(source: Path, target: Path) -> None:
    """Convert between orbax's checkpoints and ours, without a word."""
    configure_products("cpu", "float64")
    from jaxpar.orbax_checkpoint import export_checkpoint, import_checkpoint

    is_ours = (source / DESCRIPTION).is_file()
    (export_checkpoint if is_ours else import_checkpoint)(source, target)


def doctor() -> dict[str, object]:
    """Versions and devices that this side finds here."""
    try:
        gpus = [device.device_kind for device in jax.devices("gpu")]
    except RuntimeError:
        gpus = []
    cpu_devices = f"up to {MAX_CPU_DEVICES} virtual devices in one process, on {cores()} cores"
    return {"versions": versions(PACKAGES), "cpu_devices": cpu_devices, "gpus": gpus}
