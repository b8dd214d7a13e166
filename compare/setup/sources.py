"""States of other programs as checkpoints of shardpair, and `--init_from`, initial weights."""

import tempfile
from collections.abc import Mapping, Set
from pathlib import Path

import msgspec
import numpy as np

from compare.checkpoint.description import WEIGHTS, Checkpoint
from compare.checkpoint.reader import CheckpointReader, read_description
from compare.checkpoint.saver import write_checkpoint
from compare.execute.query import convert_by_side
from compare.formats.gpt2_names import from_gpt2, has_gpt2_names
from compare.formats.huggingface import is_huggingface, read_gpt2, read_model
from compare.numerics.initial_weights import INIT, checked_weights, write_weights
from compare.numerics.parameters import fingerprint
from compare.setup.resuming import any_checkpoint, differing_model, naming_a_whole_one
from compare.setup.unreadable import ORBAX_METADATA
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.system.disk import why_not_readable
from compare.system.tensors import RecordError, Tensors

PICKLES = (".pt", ".pth", ".ckpt")


def as_checkpoint(
    source: Path, folder: Path, base: Experiment | None = None, *, pythons: Mapping[str, str]
) -> CheckpointReader:
    """A verified checkpoint: the source itself, or one written to `folder`.

    `base` has the settings that nanoGPT and Hugging Face do not save. Its precision, unless the default, wins
    over nanoGPT's dtype.

    Raises:
        ExperimentError: the source cannot be read safely, or does not fit.
        EnvironmentMissing: the side that reads its format cannot run here.
    """
    own = None
    if foreign := format_of_side(source):
        convert_by_side(source, folder, foreign, pythons=pythons, base=base)
    elif is_huggingface(source):
        model, weights = read_gpt2(source)
        try:
            experiment = revalidate(edited(base or Experiment(), {"model": msgspec.structs.asdict(model)}))
        except ExperimentError as error:
            raise ExperimentError(f"{source}: {error}") from None
        made = Checkpoint(engine="Hugging Face", experiment=experiment, step=0, updates=0, corpus_sha256="")
        write_checkpoint(folder, made, {WEIGHTS: weights})
    else:
        own = any_checkpoint(source)
    with naming_a_whole_one(own or folder):
        reader = CheckpointReader(own or folder)
        reader.verify(blamed=None if own else source)
    return reader


def format_of_side(source: Path) -> str:
    """The format of a source that a side must read (`Side.converts`); '' if this process reads it."""
    if source.suffix in PICKLES and not source.is_dir():
        return "nanogpt"
    return "orbax" if (source / ORBAX_METADATA).is_file() else ""


def freeze_weights(
    source: str, experiment: Experiment, folder: Path, *, pythons: Mapping[str, str]
) -> dict[str, str]:
    """Check initial weights, and write them to `folder`/init.safetensors in the dtype of training.

    Returns fields of the request: path and fingerprint; {} without a source. `source` is safetensors with
    canonical or nanoGPT's names, or anything that `as_checkpoint` reads. Raises as `as_checkpoint`.
    """
    if not source:
        return {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        weights = _weights(Path(source), experiment, Path(scratch) / "read", pythons=pythons)
        write_weights(folder / INIT, weights)
    return {"init_from": str((folder / INIT).absolute()), "init_sha256": fingerprint(weights)}


def check_weights(source: str, experiment: Experiment) -> None:
    """Reject initial weights that do not fit, unless a side must read them. Raises ExperimentError."""
    path = Path(source)
    if source and not (path.exists() and format_of_side(path)):
        _weights(path, experiment, Path(), pythons={})


def with_model_of(source: str, experiment: Experiment, *, keep: Set[str]) -> Experiment:
    """The experiment with the model of initial weights, as nanoGPT takes it, except dropout and `keep`.

    `keep` has names such as `model.n_layer`. A safetensors file has no sizes, and a ckpt.pt is read by a side
    only: the experiment stays as it is. Raises ExperimentError: the source cannot be read.
    """
    path = Path(source)
    if is_huggingface(path):
        model = read_model(path)
    elif path.is_dir() and not format_of_side(path):
        model = read_description(any_checkpoint(path)).experiment.model
    else:
        return experiment
    fields = {
        name: value for name, value in msgspec.structs.asdict(model).items() if f"model.{name}" not in keep
    }
    return edited(experiment, {"model": fields | {"dropout": experiment.model.dropout}})


def _weights(
    source: Path, experiment: Experiment, folder: Path, *, pythons: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """The weights of any source, in the dtype of training. Raises as `as_checkpoint`."""
    origin, model = f"--init_from {source}", experiment.model
    if not source.is_dir() and (why := why_not_readable(source)):
        raise ExperimentError(f"{origin} {why}")
    if is_huggingface(source):
        model, weights = read_gpt2(source)
    elif source.is_dir() or format_of_side(source):
        base = Experiment(model=model, precision=experiment.precision)
        reader = as_checkpoint(source, folder, base, pythons=pythons)
        model, weights = reader.description.experiment.model, reader.group(WEIGHTS)
    else:
        try:
            weights = Tensors(source)
        except RecordError as error:
            hint = "give a safetensors file, or nanoGPT's ckpt.pt by a name that ends in .pt"
            raise ExperimentError(f"--init_from: {error}: {hint}") from None
        if has_gpt2_names(weights):
            weights = from_gpt2(weights, model, origin, is_linear=True)
    if differing := differing_model(Experiment(model=model), experiment):
        raise ExperimentError(f"{origin}: it has another model: {', '.join(differing)}: set --model.* so")
    return checked_weights(weights, experiment, origin)
