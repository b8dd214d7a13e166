"""`--init_from`: a user's weights, put into a run's folder as what every engine of it begins with."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from compare.execute.ask import convert_by_side
from compare.host.disk import why_not_readable
from compare.host.tensors import RecordError, Tensors
from compare.numerics.initial_weights import INIT, read_weights, write_weights
from compare.numerics.parameters import fingerprint
from compare.spec.experiment import Experiment, ExperimentError

PICKLES = (".pt", ".pth", ".ckpt")
NANOGPT = ("transformer.", "lm_head.", "_orig_mod.")


def freeze_weights(
    source: str, experiment: Experiment, folder: Path, *, pythons: Mapping[str, str]
) -> dict[str, str]:
    """Check a user's weights, and write them to `folder`/init.safetensors in the dtype of training.

    Returns fields of the request: path and fingerprint, or none where the seed gives them.

    `source` is safetensors with canonical or nanoGPT's names, or nanoGPT's ckpt.pt, which a side reads; ''
    for none. Raises ExperimentError, EnvironmentMissing.
    """
    if not source:
        return {}
    if _is_canonical(source):
        weights = read_weights(Path(source), experiment)
    else:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            converted = Path(scratch) / INIT
            convert_by_side(Path(source), converted, "nanogpt", pythons=pythons, base=experiment)
            weights = read_weights(converted, experiment)
    write_weights(folder / INIT, weights)
    return {"init_from": str((folder / INIT).absolute()), "init_sha256": fingerprint(weights)}


def check_weights(source: str, experiment: Experiment) -> None:
    """Refuse a user's weights, as far as it shows without starting a side. Raises ExperimentError."""
    if source and _is_canonical(source):
        read_weights(Path(source), experiment)


def _is_canonical(source: str) -> bool:
    """True if a file is for us to read: any safetensors but nanoGPT's. Raises ExperimentError."""
    path = Path(source)
    if why := why_not_readable(path):
        raise ExperimentError(f"--init_from: {path} {why}")
    try:
        names = [] if path.suffix in PICKLES else list(Tensors(path))
    except RecordError as error:
        raise ExperimentError(
            f"--init_from: {error}: give a safetensors file, or nanoGPT's ckpt.pt by a name that ends in .pt"
        ) from None
    return path.suffix not in PICKLES and not any(name.startswith(NANOGPT) for name in names)
