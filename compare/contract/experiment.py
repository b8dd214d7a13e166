"""One experiment: reading it, and refusing what cannot work before any process starts.

The file format is TOML, one table per section (`compare.contract.sections`). Reading is strict: an unknown
key or a wrong type is an error that names the key.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from compare.contract.sections import Data, Experiment, Layout, Model, Optimizer, Precision, Train

__all__ = [
    "MAX_CPU_DEVICES",
    "Data",
    "Experiment",
    "ExperimentError",
    "Layout",
    "Model",
    "Optimizer",
    "Precision",
    "Train",
    "check",
    "load",
    "named_experiments",
    "parse",
    "revalidate",
    "to_toml",
]

MAX_CPU_DEVICES = 64  # virtual devices share the cores; past this a run only measures the scheduler


class ExperimentError(ValueError):
    """The experiment cannot work. The message is one line that names the key or file and what to do."""


def named_experiments() -> dict[str, Path]:
    """The experiments that ship with the package, by name."""
    folder = Path(__file__).parent.parent / "experiments"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name_or_path: str) -> Experiment:
    """Read an experiment: the name of one that ships with the package, or a TOML file.

    Raises:
        ExperimentError: no such name or file, not TOML, an unknown key, a wrong type, a bad value.
    """
    known = named_experiments()
    path = known.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise ExperimentError(f"{name_or_path}: no such file or named experiment (named: {', '.join(known)})")
    return parse(path.read_bytes(), origin=str(name_or_path))


def parse(text: str | bytes, *, origin: str = "experiment") -> Experiment:
    """Read an experiment from TOML text (bytes: UTF-8).

    Raises:
        ExperimentError: whose message begins with `origin`.
    """
    try:
        return check(msgspec.toml.decode(text, type=Experiment))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise ExperimentError(f"{origin}: {_one_line(error)}") from None
    except ExperimentError as error:
        raise ExperimentError(f"{origin}: {error}") from None


def revalidate(experiment: Experiment) -> Experiment:
    """Apply the bounds on types again and `check`: for a spec that was built or edited in Python."""
    try:
        return check(msgspec.convert(msgspec.to_builtins(experiment), Experiment))
    except msgspec.ValidationError as error:
        raise ExperimentError(_one_line(error)) from None


def check(experiment: Experiment) -> Experiment:
    """Return the experiment if it can work. Raises ExperimentError with both numbers if it cannot."""
    model, train, layout = experiment.model, experiment.train, experiment.layout
    if model.n_embd % model.n_head:
        raise ExperimentError(
            f"model.n_head = {model.n_head} does not divide model.n_embd = {model.n_embd}: change one of them"
        )
    if model.dropout:
        raise ExperimentError(
            f"model.dropout = {model.dropout} must be 0: random streams cannot match across frameworks"
        )
    _check_layout(model, train, layout)
    _check_pipeline(model, train, layout)
    optimizer = experiment.optimizer
    if optimizer.decay_lr and optimizer.lr_decay_iters < optimizer.warmup_iters:
        raise ExperimentError(
            f"optimizer.lr_decay_iters = {optimizer.lr_decay_iters} is less than optimizer.warmup_iters = "
            f"{optimizer.warmup_iters}: the cosine would end before it starts"
        )
    return experiment


def _check_layout(model: Model, train: Train, layout: Layout) -> None:
    shares = {key: getattr(layout, key) for key in ("dp_replicate", "dp_shard")}
    if train.batch_size % layout.data_parallel:
        degrees = " x ".join(f"layout.{key} = {degree}" for key, degree in shares.items() if degree > 1)
        raise ExperimentError(
            f"train.batch_size = {train.batch_size} is not divisible by {degrees}: change one of them"
        )
    if layout.zero and layout.dp_shard == 1:
        raise ExperimentError(
            f"layout.zero = {layout.zero} with layout.dp_shard = 1: there is nothing to split; set "
            f"layout.dp_shard to 2 or more, or layout.zero to 0"
        )
    if layout.dp_shard > 1 and not layout.zero:
        raise ExperimentError(
            f"layout.dp_shard = {layout.dp_shard} with layout.zero = 0: say what is split: layout.zero = 1 "
            f"(optimizer state), 2 (and gradients) or 3 (and parameters)"
        )
    if not layout.reshard_after_forward and layout.zero != 3:
        raise ExperimentError(
            f"layout.reshard_after_forward = false with layout.zero = {layout.zero}: only zero = 3 gathers "
            f"parameters; set layout.zero to 3"
        )
    if model.n_head % layout.tp:
        raise ExperimentError(
            f"layout.tp = {layout.tp} does not divide model.n_head = {model.n_head}: change one of them"
        )
    if model.vocab_size <= (layout.tp - 1) * -(-model.vocab_size // layout.tp):
        raise ExperimentError(
            f"layout.tp = {layout.tp} leaves a rank nothing of model.vocab_size = {model.vocab_size}: lower "
            f"layout.tp"
        )
    if layout.sequence_parallel and layout.tp == 1:
        raise ExperimentError(
            "layout.sequence_parallel = true with layout.tp = 1: it splits what tp leaves; raise layout.tp"
        )
    if layout.sequence_parallel and model.block_size % layout.tp:
        raise ExperimentError(
            f"layout.sequence_parallel = true: layout.tp = {layout.tp} does not divide model.block_size = "
            f"{model.block_size}: change one of them"
        )


def _check_pipeline(model: Model, train: Train, layout: Layout) -> None:
    if layout.pp == 1:
        for key in ("chunks", "microbatches"):
            if getattr(layout, key) > 1:
                raise ExperimentError(
                    f"layout.{key} = {getattr(layout, key)} with layout.pp = 1: there is no pipeline; raise "
                    f"layout.pp, or accumulate with train.gradient_accumulation_steps"
                )
        return
    if (layout.chunks > 1) != (layout.schedule == "interleaved"):
        raise ExperimentError(
            f"layout.schedule = {layout.schedule} with layout.chunks = {layout.chunks}: interleaved has 2 or "
            f"more chunks, every other schedule 1"
        )
    stages = layout.pp * layout.chunks
    if model.n_layer % stages:
        raise ExperimentError(
            f"layout.pp = {layout.pp} x layout.chunks = {layout.chunks} stages do not divide model.n_layer = "
            f"{model.n_layer}: change one of them"
        )
    share = train.batch_size // layout.data_parallel
    if share % layout.microbatches:
        raise ExperimentError(
            f"layout.microbatches = {layout.microbatches} does not divide the {share} sequences of a "
            f"data-parallel share: change it or train.batch_size"
        )
    in_schedule = layout.microbatches * train.gradient_accumulation_steps
    if layout.schedule != "gpipe" and in_schedule < layout.pp:
        raise ExperimentError(
            f"layout.schedule = {layout.schedule} has {in_schedule} microbatches for layout.pp = {layout.pp} "
            f"stages: raise layout.microbatches, or use gpipe"
        )
    if layout.schedule == "interleaved" and in_schedule % layout.pp:
        raise ExperimentError(
            f"layout.schedule = interleaved has {in_schedule} microbatches, which layout.pp = {layout.pp} "
            f"does not divide: change layout.microbatches"
        )


def edited(experiment: Experiment, edits: Mapping[str, Mapping[str, object]]) -> Experiment:
    """The experiment with other values in some fields, unchecked: `{"train": {"max_iters": 2}}`."""
    sections = {
        section: msgspec.structs.replace(getattr(experiment, section), **fields)
        for section, fields in edits.items()
    }
    return msgspec.structs.replace(experiment, **sections)


def to_toml(experiment: Experiment) -> str:
    """The resolved spec as TOML text, every field spelled out."""
    return msgspec.toml.encode(experiment).decode()


def _one_line(error: Exception) -> str:
    """msgspec's message with its `$.model.n_layer` path as we write keys: `model.n_layer`."""
    return " ".join(str(error).split()).replace("`$.", "`").replace("- at `$`", "at the top level")
