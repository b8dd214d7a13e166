"""One experiment: reading it, and refusing what cannot work before any process starts.

The file format is TOML, one table per section (`compare.contract.sections`). Reading is strict: an unknown
key or a wrong type is an error that names the key.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from compare.contract.axes import BATCH
from compare.contract.host.files import why_not_readable
from compare.contract.sections import (
    Checkpoints,
    Data,
    Experiment,
    Layout,
    Model,
    Optimizer,
    Precision,
    Train,
)

__all__ = [
    "MAX_CPU_DEVICES",
    "Checkpoints",
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
MAX_TASKS = 200_000  # of a pipeline's schedule: each is an object in a list
MAX_FILE_BYTES = (
    16_384  # a longer file is no experiment; Python's TOML reader takes minutes for 100 kB of dots
)
LARGEST_FLOAT32 = 3.4028234663852886e38


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
    wrong = why_not_readable(path) if name_or_path else "is empty"
    if wrong == "does not exist":
        raise ExperimentError(f"{name_or_path}: no such file or named experiment (named: {', '.join(known)})")
    if wrong:
        raise ExperimentError(
            f"{name_or_path or 'the name of the experiment'} {wrong}: give a TOML file or a named "
            f"experiment (named: {', '.join(known)})"
        )
    with path.open("rb") as file:
        return parse(file.read(MAX_FILE_BYTES + 1), origin=name_or_path)


def parse(text: str | bytes, *, origin: str = "experiment") -> Experiment:
    """Read an experiment from TOML text (bytes: UTF-8).

    Raises:
        ExperimentError: whose message begins with `origin`.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ExperimentError(f"{origin}: longer than {MAX_FILE_BYTES} bytes, which no experiment is")
    try:
        return _checked(msgspec.toml.decode(text))
    except ExperimentError as error:
        raise ExperimentError(f"{origin}: {error}") from None
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: not UTF-8, a number of 5000 digits
        raise ExperimentError(f"{origin}: {_one_line(error)}") from None
    except RecursionError:
        raise ExperimentError(f"{origin}: nested too deeply: an experiment has tables of fields") from None


def revalidate(experiment: Experiment) -> Experiment:
    """Apply the bounds on types again and `check`: for a spec that was built or edited in Python."""
    return _checked(msgspec.to_builtins(experiment))


def _checked(fields: Any) -> Experiment:
    """An experiment from its tables of fields. Raises ExperimentError, which names the key and its value."""
    for section, table in fields.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise ExperimentError(f"{section}.{key} = {value} must be a finite number")
    try:
        return check(msgspec.convert(fields, Experiment))
    except msgspec.ValidationError as error:
        raise ExperimentError(_with_value(_one_line(error), fields)) from None


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
    if not experiment.data.source:
        raise ExperimentError("data.source is empty: give stdlib, synthetic, or the name of a file or folder")
    _check_floats(experiment)
    _check_layout(model, train, layout)
    _check_pipeline(model, train, layout)
    optimizer = experiment.optimizer
    if optimizer.decay_lr and optimizer.lr_decay_iters < optimizer.warmup_iters:
        raise ExperimentError(
            f"optimizer.lr_decay_iters = {optimizer.lr_decay_iters} is less than optimizer.warmup_iters = "
            f"{optimizer.warmup_iters}: the cosine would end before it starts"
        )
    return experiment


def _check_floats(experiment: Experiment) -> None:
    """Refuse floats that overflow in the engines, which compute in float32 unless told otherwise."""
    if experiment.precision.dtype == "float64":
        return
    for section, fields in (("model", experiment.model), ("optimizer", experiment.optimizer)):
        for key in fields.__struct_fields__:
            value = getattr(fields, key)
            if isinstance(value, float) and value > LARGEST_FLOAT32:
                raise ExperimentError(
                    f"{section}.{key} = {value} is infinite in float32: the most is {LARGEST_FLOAT32:.4g}"
                )


def _check_layout(model: Model, train: Train, layout: Layout) -> None:
    shares = {key: layout.axes[key] for key in BATCH}
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
    check_tasks(layout.pp, in_schedule, layout.chunks)
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


def check_tasks(ranks: int, microbatches: int, chunks: int) -> None:
    """Refuse a schedule that would take minutes and gigabytes to write down. Raises ExperimentError."""
    tasks = 2 * ranks * microbatches * chunks
    if tasks > MAX_TASKS:
        raise ExperimentError(
            f"{ranks} ranks with {chunks} stages each and {microbatches} microbatches make a schedule of "
            f"{tasks:,} tasks; the most is {MAX_TASKS:,}: lower one of them"
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


def _with_value(message: str, fields: Any) -> str:
    """A complaint about a bound, with the value that is out of it: "Expected `int` >= 1, got 0 - at ..."."""
    key = re.search(r"^(Expected `\w+` [<>]=? [^,]*) - at `(\w+)\.(\w+)`$", message)
    if not key:
        return message
    bound, section, field = key.groups()
    return f"{bound}, got {fields[section][field]} - at `{section}.{field}`"
