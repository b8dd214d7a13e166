"""`shardpair convert`: checkpoints from and to nanoGPT, Hugging Face and orbax.

All engines save one format (`compare.checkpoint`), and continue from it.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import tyro

from compare.checkpoint.description import DESCRIPTION, WEIGHTS, Checkpoint
from compare.checkpoint.reader import CheckpointReader
from compare.execute.query import convert_by_side
from compare.flags import AsJson, SidePythons, find_pythons
from compare.formats.gpt2_names import require_gpt2
from compare.formats.huggingface import write_gpt2
from compare.formats.nanogpt import load_experiment, require_nanogpt
from compare.numerics.initial_weights import write_weights
from compare.setup.sources import PICKLES, as_checkpoint
from compare.show.envelope import Envelope
from compare.side.run_lock import lock_folder
from compare.spec.experiment import Experiment, ExperimentError
from compare.system.disk import no_room
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
    json: AsJson = False

    def __call__(self) -> int:
        """Convert. Returns 0."""
        to = self.to or FORMATS.get(self.target.suffix, "checkpoint")
        base = load_experiment(self.experiment) if self.experiment else None
        made = convert(self.source, self.target, to, base, pythons=find_pythons(self))
        model, dtype = made.experiment.model, made.experiment.precision.dtype
        verdict = (
            f"{self.target}: {to}, of {made.engine}, at step {made.step}, after {made.updates} updates: "
            f"{model.n_layer} layers of width {model.n_embd}, dropout {model.dropout}, {dtype}, data of "
            f"{made.experiment.data.source}"
        )
        if self.json:
            values = {"target": str(self.target), "format": to, "checkpoint": made}
            print_json(Envelope(study="convert", passed=True, verdict=verdict, values=values))
        else:
            results_console().print(verdict, soft_wrap=True)
        return 0


def convert(
    source: Path, target: Path, to: Format, base: Experiment | None, *, pythons: Mapping[str, str]
) -> Checkpoint:
    """Convert a checkpoint. Returns its description. `base` is an argument of `as_checkpoint`.

    Raises:
        ExperimentError: the target exists, or its format cannot express the checkpoint.
        OSError: the disk of the target is full.
        EnvironmentMissing, ExperimentError: as `as_checkpoint`.
    """
    if target.exists():
        raise ExperimentError(f"{target} exists already: give another name, or remove it")
    if not target.absolute().parent.is_dir():
        raise ExperimentError(f"{target}: the folder {target.parent} is missing: create it")
    try:
        with _scratch_for(target) as scratch:
            reader = as_checkpoint(source, scratch / "read", base, pythons=pythons)
            written = scratch / f"written{target.suffix}"
            _write(reader, written, to, origin=str(source), pythons=pythons)
            written.rename(target)
    except OSError as error:
        if no_room(error):
            raise OSError(error.errno, error.strerror, str(target)) from None
        raise
    return reader.description


def _write(
    reader: CheckpointReader, written: Path, to: Format, *, origin: str, pythons: Mapping[str, str]
) -> None:
    """Write a checkpoint in a format. Raises ExperimentError: the format cannot express it."""
    experiment = reader.description.experiment
    if to == "checkpoint":
        written.mkdir()
        for name in (DESCRIPTION, *reader.description.files):
            shutil.copy(reader.folder / name, written)
    elif to in ("nanogpt", "orbax"):
        if to == "nanogpt":
            require_nanogpt(experiment, origin)
        convert_by_side(reader.folder, written, to, pythons=pythons)
    elif to == "huggingface":
        require_gpt2(experiment.model, origin)
        write_gpt2(written, experiment.model, reader.group(WEIGHTS))
    else:
        write_weights(written, reader.group(WEIGHTS))


@contextlib.contextmanager
def _scratch_for(target: Path) -> Generator[Path]:
    """A temporary folder next to the target. It replaces the folder that a killed conversion has left.

    Raises ExperimentError: another process converts to this target.
    """
    folder = target.absolute().with_name(f".{target.name}.shardpair-convert")
    folder.mkdir(exist_ok=True)
    with lock_folder(folder):
        try:
            for left in folder.iterdir():
                shutil.rmtree(left)
            yield Path(
                tempfile.mkdtemp(dir=folder)
            )  # a killed conversion's side may still write into its own
        finally:
            shutil.rmtree(folder, ignore_errors=True)
