"""`shardpair convert`: a state from nanoGPT or Hugging Face, or for them.

What every engine saves is one format already (`compare.checkpoint`): any of them goes on from it.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import tyro

from compare.checkpoint.description import WEIGHTS, Checkpoint
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Part, write_checkpoint
from compare.execute.ask import convert_by_side
from compare.flags import SidePythons, checked_pythons
from compare.numerics.initial_weights import write_weights
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import storage_dtype
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.studies.huggingface import is_huggingface, read_gpt2, write_gpt2
from compare.studies.nanogpt_config import load_experiment
from compare.studies.own_weights import PICKLES
from compare.studies.resuming import any_checkpoint
from compare.terminal import print_json, results_console

Format = Literal["checkpoint", "nanogpt", "huggingface", "orbax", "weights"]
HUGGING_FACE = "Hugging Face"
ORBAX_METADATA = "_CHECKPOINT_METADATA"


class Convert(SidePythons, frozen=True, kw_only=True):
    """Write the state of a training in another format; nothing in a file is executed.

    Checkpoints of all engines are one format, and need no conversion: any of them goes on from any.

    Try:
      shardpair convert out-shakespeare-char/ckpt.pt imported      (then: shardpair run --resume imported ...)
      shardpair convert runs/demo-20260101-120000/jax-manual ckpt.pt
      shardpair convert gpt2/ imported
      shardpair convert imported exported --to huggingface
      shardpair convert imported weights.safetensors               (then: shardpair run --init_from ...)
    """

    source: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or the folder of an engine's run, whose newest is taken; nanoGPT's ckpt.pt, with its
    optimizer's state; a folder with Hugging Face's GPT-2 (config.json and model.safetensors); or an orbax
    checkpoint that this command wrote."""
    target: Annotated[Path, tyro.conf.Positional]
    """What to write; must not exist."""
    to: Format | None = None
    """With everything: checkpoint (ours), nanogpt (a ckpt.pt), orbax. Weights alone: huggingface (a folder),
    weights (safetensors with canonical names). Default: by TARGET's suffix, .pt nanogpt, .safetensors
    weights, any other checkpoint."""
    experiment: str = ""
    """An experiment that says what nanoGPT and Hugging Face do not: where the data is, the dtype of the
    numbers. Default: the defaults of every field, on one device."""
    json: bool = False
    """Print what was converted as one JSON object on stdout."""

    def __call__(self) -> int:
        """Convert. Returns 0."""
        to = self.to or format_of(self.target)
        base = load_experiment(self.experiment) if self.experiment else Experiment()
        made = convert(self.source, self.target, to, base, pythons=checked_pythons(self))
        if self.json:
            print_json({"target": str(self.target), "format": to, "checkpoint": msgspec.to_builtins(made)})
            return 0
        model, dtype = made.experiment.model, made.experiment.precision.dtype
        results_console().print(
            f"{self.target}: {to}, of {made.engine}, after {made.updates} updates: {model.n_layer} layers "
            f"of width {model.n_embd}, {dtype}",
            soft_wrap=True,
        )
        return 0


def format_of(target: Path) -> Format:
    """The format that a name asks for: .pt nanoGPT's, .safetensors weights alone, another a checkpoint."""
    if target.suffix in PICKLES:
        return "nanogpt"
    return "weights" if target.suffix == ".safetensors" else "checkpoint"


def convert(
    source: Path, target: Path, to: Format, base: Experiment, *, pythons: Mapping[str, str]
) -> Checkpoint:
    """Convert a state, and describe it; `base` is for what nanoGPT and Hugging Face do not say.

    Raises:
        ExperimentError: the source cannot be read safely or does not fit, or the target is there.
        EnvironmentMissing: the side that reads and writes pickles cannot be run here.
    """
    parent = target.absolute().parent
    if target.exists():
        raise ExperimentError(f"{target} exists already: give another name, or remove it")
    if not parent.is_dir():
        raise ExperimentError(f"{target}: there is no folder {target.parent}")
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{target.name}.") as scratch:
        folder = as_checkpoint(source, Path(scratch) / "read", base, pythons=pythons)
        written, reader = Path(scratch) / f"written{target.suffix}", CheckpointReader(folder)
        reader.verify()
        if to == "checkpoint":
            shutil.copytree(folder, written)
        elif to in ("nanogpt", "orbax"):
            convert_by_side(folder, written, to, pythons=pythons)
        elif to == "huggingface":
            write_gpt2(written, reader.description.experiment.model, reader.group(WEIGHTS))
        else:
            write_weights(written, reader.group(WEIGHTS))
        written.rename(target)
    return reader.description


def as_checkpoint(source: Path, folder: Path, base: Experiment, *, pythons: Mapping[str, str]) -> Path:
    """The folder of a checkpoint: the source's own, or one made in `folder`. Raises as `convert`."""
    foreign = "nanogpt" if source.suffix in PICKLES else "orbax"
    if source.suffix in PICKLES or (source / ORBAX_METADATA).is_file():
        convert_by_side(source, folder, foreign, pythons=pythons, base=base)
        return folder
    if not is_huggingface(source):
        return any_checkpoint(source)
    model, weights = read_gpt2(source)
    experiment = edited(base, {"model": msgspec.structs.asdict(model)})
    made = Checkpoint(engine=HUGGING_FACE, experiment=experiment, step=0, updates=0, corpus_sha256="")
    write_checkpoint(folder, made, _fresh(weights, experiment))
    return folder


def _fresh(weights: Mapping[str, np.ndarray], experiment: Experiment) -> Iterator[Part]:
    """Weights with the moments that an optimizer begins with."""
    dtype = storage_dtype(experiment)
    for name, array in weights.items():
        shard = Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape)
        yield WEIGHTS, shard, array.astype(dtype)
        for group in moment_names(experiment.optimizer):
            yield group, shard, np.zeros(array.shape, dtype)
