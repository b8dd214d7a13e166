"""`shardpair convert`: a training's state from one format into another.

What every engine saves is one format already (`compare.checkpoint`): any of them goes on from it.
This is for what comes from elsewhere, and goes there.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from compare.checkpoint.description import WEIGHTS, Checkpoint
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Part, write_checkpoint
from compare.execute.ask import convert_by_side
from compare.numerics.initial_weights import write_weights
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import storage_dtype
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.studies.huggingface import WEIGHTS_FILE, is_huggingface, read_gpt2, write_gpt2
from compare.studies.own_weights import PICKLES
from compare.studies.resuming import any_checkpoint

Format = Literal["checkpoint", "nanogpt", "huggingface", "orbax", "weights"]
HUGGING_FACE = "Hugging Face"
ORBAX_METADATA = "_CHECKPOINT_METADATA"


def format_of(target: Path) -> Format:
    """What a name asks for: .pt nanoGPT's, .safetensors weights alone, any other one a checkpoint."""
    if target.suffix in PICKLES:
        return "nanogpt"
    return "weights" if target.suffix == ".safetensors" else "checkpoint"


def convert(
    source: Path, target: Path, to: Format, base: Experiment, *, pythons: Mapping[str, str]
) -> Checkpoint:
    """Convert a state, and describe it.

    Args:
        source: a checkpoint, or the folder of an engine's run, whose newest is taken; nanoGPT's ckpt.pt; a
            folder with Hugging Face's GPT-2; one of orbax.
        target: a file or folder; must not exist.
        to: its format.
        base: for what nanoGPT and Hugging Face do not say: where the data is, and the numbers' dtype.
        pythons: side -> its interpreter; one side alone reads and writes pickles.

    Raises:
        ExperimentError: the source cannot be read safely or does not fit, or the target is there.
        EnvironmentMissing: that side cannot be run here.
    """
    if target.exists():
        raise ExperimentError(f"{target} exists already: give another name, or remove it")
    if not target.absolute().parent.is_dir():
        raise ExperimentError(f"{target}: there is no folder {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as scratch:
        folder = as_checkpoint(source, Path(scratch) / "read", base, pythons=pythons)
        reader = CheckpointReader(folder)
        reader.verify()
        written = Path(scratch) / f"written{target.suffix}"
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
    """The folder of a checkpoint: the source's own, or of what is none made in `folder`. As of `convert`."""
    if source.suffix in PICKLES:
        options = ["--experiment", msgspec.json.encode(base).decode()]
        convert_by_side(source, folder, "nanogpt", pythons=pythons, options=options)
        return folder
    if (source / ORBAX_METADATA).is_file():
        convert_by_side(source, folder, "orbax", pythons=pythons)
        return folder
    if not is_huggingface(source):
        if why := _known_but_not_read(source):
            raise ExperimentError(f"{source}: {why}")
        return any_checkpoint(source)
    model, weights = read_gpt2(source)
    experiment = edited(base, {"model": msgspec.structs.asdict(model)})
    made = Checkpoint(engine=HUGGING_FACE, experiment=experiment, step=0, updates=0, corpus_sha256="")
    write_checkpoint(folder, made, _fresh(weights, experiment))
    return folder


def _known_but_not_read(source: Path) -> str:
    """What a folder of another tool lacks, and how to make it; '' for none that is known."""
    if (source / f"{WEIGHTS_FILE}.index.json").is_file():
        return 'its weights are in several files: give save_pretrained(..., max_shard_size="100GB")'
    if (source / "pytorch_model.bin").is_file():
        return "its weights are a pickle: write them as model.safetensors, with save_pretrained(...)"
    of_step = (ORBAX_METADATA, f"*/{ORBAX_METADATA}")
    if step := next((path for path in source.glob("*") for name in of_step if any(path.glob(name))), None):
        return f"it is the root of an orbax CheckpointManager: give one of its steps, such as {step}"
    return ""


def _fresh(weights: Mapping[str, np.ndarray], experiment: Experiment) -> Iterator[Part]:
    """Weights with the moments that an optimizer begins with."""
    dtype = storage_dtype(experiment)
    for name, array in weights.items():
        shard = Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape)
        yield WEIGHTS, shard, array.astype(dtype)
        for group in moment_names(experiment.optimizer):
            yield group, shard, np.zeros(array.shape, dtype)
