"""`shardpair convert`: checkpoints from and to nanoGPT, Hugging Face and orbax.

All engines save one format (`compare.checkpoint`), and continue from it.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from compare.checkpoint.description import WEIGHTS, Checkpoint
from compare.execute.query import convert_by_side
from compare.flags import SidePythons, find_pythons
from compare.formats.huggingface import write_gpt2
from compare.formats.nanogpt import load_experiment
from compare.numerics.initial_weights import write_weights
from compare.setup.sources import PICKLES, as_checkpoint
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal import print_json, results_console

Format = Literal["checkpoint", "nanogpt", "huggingface", "orbax", "weights"]
FORMATS: dict[str, Format] = {**dict.fromkeys(PICKLES, "nanogpt"), ".safetensors": "weights"}
"""Suffix of a target -> its format; any other suffix is a checkpoint."""


class Convert(SidePythons, frozen=True, kw_only=True):
    """Convert a checkpoint to another format. Nothing in a file is executed.

    Checkpoints of all engines have one format, and need no conversion.

    Try:
      shardpair convert out-shakespeare-char/ckpt.pt imported      (then: shardpair run --resume imported ...)
      shardpair convert runs/demo-20260101-120000/jax-manual ckpt.pt
      shardpair convert gpt2/ imported
      shardpair convert imported exported --to huggingface
      shardpair convert imported weights.safetensors               (then: shardpair run --init_from ...)
    """

    source: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, or the folder of an engine's run with its newest checkpoint; nanoGPT's ckpt.pt, with its
    optimizer's state, or weights only, which start at step 0; a folder with Hugging Face's GPT-2
    (config.json and model.safetensors); or an orbax checkpoint that this command wrote."""
    target: Annotated[Path, tyro.conf.Positional]
    """New file or folder to write."""
    to: Format | None = None
    """Full states: checkpoint (shardpair's), nanogpt (a ckpt.pt), orbax. Weights only: huggingface (a
    folder), weights (safetensors with canonical names). Default: by TARGET's suffix, .pt nanogpt,
    .safetensors weights, any other checkpoint."""
    experiment: str = ""
    """Experiment with the settings that nanoGPT and Hugging Face do not save. Its data and precision, unless
    they are the defaults, win over nanoGPT's data/DATASET and dtype."""
    json: bool = False
    """Print the description of the checkpoint as one JSON object on stdout."""

    def __call__(self) -> int:
        """Convert. Returns 0."""
        to = self.to or FORMATS.get(self.target.suffix, "checkpoint")
        base = load_experiment(self.experiment) if self.experiment else None
        made = convert(self.source, self.target, to, base, pythons=find_pythons(self))
        if self.json:
            print_json({"target": str(self.target), "format": to, "checkpoint": msgspec.to_builtins(made)})
            return 0
        model, dtype = made.experiment.model, made.experiment.precision.dtype
        results_console().print(
            f"{self.target}: {to}, of {made.engine}, at step {made.step}, after {made.updates} updates: "
            f"{model.n_layer} layers of width {model.n_embd}, dropout {model.dropout}, {dtype}, data of "
            f"{made.experiment.data.source}",
            soft_wrap=True,
        )
        return 0


def convert(
    source: Path, target: Path, to: Format, base: Experiment | None, *, pythons: Mapping[str, str]
) -> Checkpoint:
    """Convert a checkpoint. Returns its description. `base` is an argument of `as_checkpoint`.

    Raises ExperimentError: the target exists. Also raises as `as_checkpoint`.
    """
    parent = target.absolute().parent
    if target.exists():
        raise ExperimentError(f"{target} exists already: give another name, or remove it")
    if not parent.is_dir():
        raise ExperimentError(f"{target}: the folder {target.parent} is missing: create it")
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{target.name}.") as scratch:
        reader = as_checkpoint(source, Path(scratch) / "read", base, pythons=pythons)
        written = Path(scratch) / f"written{target.suffix}"
        if to == "checkpoint":
            shutil.copytree(reader.folder, written)
        elif to in ("nanogpt", "orbax"):
            convert_by_side(reader.folder, written, to, pythons=pythons)
        elif to == "huggingface":
            write_gpt2(written, reader.description.experiment.model, reader.group(WEIGHTS))
        else:
            write_weights(written, reader.group(WEIGHTS))
        written.rename(target)
    return reader.description
