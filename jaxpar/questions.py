"""What `python -m jaxpar --WORD` answers with one line of JSON, instead of training."""

import json
from pathlib import Path
from typing import Any

import jax
import msgspec

from compare.checkpoint.description import DESCRIPTION
from compare.checkpoint.reader import read_description
from compare.contract.ahead_of_time import read_ahead_request
from compare.contract.ceiling import read_ceiling_request
from compare.host.facts import cores, versions
from compare.numerics.parameters import storage_dtype
from compare.numerics.sampling import read_sample_request
from compare.spec.experiment import MAX_CPU_DEVICES
from jaxpar.configuration import configure_products
from jaxpar.measure.usage import PACKAGES


def ceiling(text: str) -> None:
    """How fast matrices are multiplied. Raises ExperimentError, MissingDevicesError."""
    request = read_ceiling_request(text)
    configure_products(request.platform, request.dtype)
    # Imported after configuring: a backend, once started, keeps its devices and platform.
    from jaxpar.measure.ceiling import measure

    _say(measure(request))


def compile_ahead(text: str) -> None:
    """What a step would be on devices that are not here. Raises ExperimentError, MissingPackageError."""
    request = read_ahead_request(text)
    configure_products("cpu", request.experiment.precision.product_dtype)
    from jaxpar.ahead_of_time import compile_step_ahead

    _say(compile_step_ahead(request))


def convert(source: Path, target: Path) -> None:
    """Convert between orbax's checkpoints and ours, without a word. Raises ExperimentError."""
    configure_products("cpu", "float64")
    from jaxpar.orbax_checkpoint import export_checkpoint, import_checkpoint

    is_ours = (source / DESCRIPTION).is_file()
    (export_checkpoint if is_ours else import_checkpoint)(source, target)


def draw_sample(text: str) -> None:
    """Token ids drawn from a checkpoint. Raises ExperimentError."""
    request = read_sample_request(text)
    kept = read_description(Path(request.checkpoint)).experiment
    configure_products("cpu", str(storage_dtype(kept)))
    from jaxpar.sample import sample

    print(json.dumps(sample(request)))


def doctor() -> None:
    """Versions and devices that this side finds here."""
    try:
        gpus = [device.device_kind for device in jax.devices("gpu")]
    except RuntimeError:
        gpus = []
    cpu_devices = f"up to {MAX_CPU_DEVICES} virtual devices in one process, on {cores()} cores"
    print(json.dumps({"versions": versions(PACKAGES), "cpu_devices": cpu_devices, "gpus": gpus}))


def _say(answer: Any) -> None:
    print(msgspec.json.encode(answer).decode())
