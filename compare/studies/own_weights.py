"""`--init_from`: a user's weights, put into a run's folder as what every engine of it begins with."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.engines.registry import SIDES
from compare.contract.experiment import Experiment, ExperimentError
from compare.contract.host.files import why_not_readable
from compare.contract.initial_weights import INIT, read_weights, write_weights
from compare.contract.parameters import fingerprint
from compare.contract.tensors import RecordError, Tensors
from compare.execute.launch import EnvironmentMissing, child_environment

PICKLES = (".pt", ".pth", ".ckpt")
NANOGPT = ("transformer.", "lm_head.", "_orig_mod.")
BAD_REQUEST = 2


class Init(Struct, frozen=True, kw_only=True):
    """Path and kind of a run's own initial weights; both '' where the seed gives them."""

    path: str = ""
    sha256: str = ""


def freeze_weights(source: str, experiment: Experiment, folder: Path, *, pythons: Mapping[str, str]) -> Init:
    """Check a user's weights, and write them to `folder`/init.safetensors in the dtype of training.

    Args:
        source: safetensors with canonical or nanoGPT's names, or nanoGPT's ckpt.pt; '' for none.
        experiment: the model that they must fit.
        folder: of the run; removed if they do not.
        pythons: side -> its interpreter; one side alone can read what is not canonical.

    Raises:
        ExperimentError: the file cannot be read, or does not fit: one line with the numbers.
        EnvironmentMissing: that side cannot be run here.
    """
    if not source:
        return Init()
    try:
        path = Path(source)
        if why := why_not_readable(path):
            raise ExperimentError(f"--init_from: {path} {why}")
        if _is_canonical(path):
            weights = read_weights(path, experiment)
        else:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                converted = Path(scratch) / INIT
                _convert(path.absolute(), converted, experiment, pythons=pythons)
                weights = read_weights(converted, experiment)
        write_weights(folder / INIT, weights)
        return Init(path=str((folder / INIT).absolute()), sha256=fingerprint(weights))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def objection_to(source: str, experiment: Experiment) -> str:
    """An objection to a user's weights, as far as it shows without starting a side; '' if there is none."""
    path = Path(source)
    if why := why_not_readable(path):
        return f"--init_from: {path} {why}"
    try:
        if _is_canonical(path):
            read_weights(path, experiment)
    except ExperimentError as error:
        return str(error)
    return ""


def _is_canonical(path: Path) -> bool:
    """True if a file is for us to read: any safetensors but nanoGPT's."""
    if path.suffix in PICKLES:
        return False
    try:
        names = list(Tensors(path))
    except RecordError as error:
        raise ExperimentError(
            f"--init_from: {error}: give a safetensors file, or nanoGPT's ckpt.pt by a name that ends in .pt"
        ) from None
    return not any(name.startswith(NANOGPT) for name in names)


def _convert(source: Path, target: Path, experiment: Experiment, *, pythons: Mapping[str, str]) -> None:
    side = next(side for side in SIDES.values() if side.converts_checkpoints)
    python = pythons.get(side.name, sys.executable)
    model = msgspec.json.encode(experiment.model).decode()
    command = [python, "-m", side.name, "--convert", str(source), str(target), "--model", model]
    environment = child_environment(side, "cpu")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise EnvironmentMissing(f"--{side.python_flag} {python}: {error.strerror}") from None
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode} and no message"]
    if done.returncode == BAD_REQUEST:
        raise ExperimentError(said[-1])
    if done.returncode:
        raise EnvironmentMissing(f"{source} could not be converted by {python} -m {side.name}: {said[-1]}")
