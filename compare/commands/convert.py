"""`shardpair convert`: a state from nanoGPT or Hugging Face, or for them.

What every engine saves is one format already (`compare.checkpoint`): any of them goes on from it.
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
from compare.flags import SidePythons, checked_pythons
from compare.formats.huggingface import write_gpt2
from compare.formats.nanogpt import load_experiment
from compare.numerics.initial_weights import write_weights
from compare.setup.sources import PICKLES, as_checkpoint
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal import print_json, results_console

Format = Literal["checkpoint", "nanogpt", "huggingface", "orbax", "weights"]
FORMATS: dict[str, Format] = {**dict.fromkeys(PICKLES, "nanogpt"), ".safetensors": "weights"}
"""What a target's suffix asks for; another one asks for a checkpoint."""


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
    optimizer's state, or weights alone, which begin at step 0; a folder with Hugging Face's GPT-2
    (config.json and model.safetensors); or an orbax checkpoint that this command wrote."""
    target: Annotated[Path, tyro.conf.Positional]
    """What to write; must not exist."""
    to: Format | None = None
    """With everything: checkpoint (ours), nanogpt (a ckpt.pt), orbax. Weights alone: huggingface (a folder),
    weights (safetensors with canonical names). Default: by TARGET's suffix, .pt nanogpt, .safetensors
    weights, any other checkpoint."""
    experiment: str = ""
    """An experiment that says what nanoGPT and Hugging Face do not. Its data and precision, unless they are
    the defaults, win over nanoGPT's data/DATASET and dtype."""
    json: bool = False
    """Print what was converted as one JSON object on stdout."""

    def __call__(self) -> int:
        """Convert. Returns 0."""
        to = self.to or FORMATS.get(self.target.suffix, "checkpoint")
        base = load_experiment(self.experiment) if self.experiment else None
        made = convert(self.source, self.target, to, base, pythons=checked_pythons(self))
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
    """Convert a state, and describe it. `base` and what is raised are as of `as_checkpoint`.

    Raises ExperimentError: the target is there.
    """
    parent = target.absolute().parent
    if target.exists():
        raise ExperimentError(f"{target} exists already: give another name, or remove it")
    if not parent.is_dir():
        raise ExperimentError(f"{target}: there is no folder {target.parent}")
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
