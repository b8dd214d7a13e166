"""`shardpair convert`: a state from nanoGPT or Hugging Face, or for them."""

from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from compare.flags.pythons import SidePythons, checked_pythons
from compare.spec.experiment import Experiment
from compare.studies.conversion import Format, convert, format_of
from compare.studies.nanogpt_config import load_experiment
from compare.terminal import print_json, results_console


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

    def __call__(self, default: Experiment) -> int:
        """Convert. Returns 0."""
        to, base = self.to or format_of(self.target), self._base()
        found = convert(self.source, self.target, to, base, pythons=checked_pythons(self))
        if self.json:
            print_json({"target": str(self.target), "format": to, "checkpoint": msgspec.to_builtins(found)})
            return 0
        model = found.experiment.model
        results_console().print(
            f"{self.target}: {to}, of {found.engine}, after {found.updates} updates: {model.n_layer} layers "
            f"of width {model.n_embd}, {found.experiment.precision.dtype}",
            soft_wrap=True,
        )
        return 0

    def _base(self) -> Experiment:
        return load_experiment(self.experiment) if self.experiment else Experiment()
