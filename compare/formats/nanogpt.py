"""nanoGPT's settings and config files, such as config/train_shakespeare_char.py, as experiments.

A config file is parsed and never executed. It may contain only assignments of literals and of products of
numbers (5 * 8). Missing settings have the defaults of nanoGPT's train.py. nanoGPT's flags after a config file
(`--max_iters=10`) are also read.
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from compare.formats.tokens import META, alphabet_size
from compare.spec.experiment import Experiment, ExperimentError, checked, edited, load, revalidate
from compare.system.disk import why_not_readable

FIELDS = {
    **dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"), "model"),
    **dict.fromkeys(("learning_rate", "decay_lr", "warmup_iters", "lr_decay_iters", "min_lr"), "optimizer"),
    **dict.fromkeys(("weight_decay", "beta1", "beta2", "grad_clip"), "optimizer"),
    **dict.fromkeys(("max_iters", "batch_size", "gradient_accumulation_steps"), "train"),
    "dtype": "precision",
}
"""Setting of nanoGPT -> the section with the field of the same name."""
MODEL_ARGS = [name for name, section in FIELDS.items() if section == "model"]
"""Settings of the model in nanoGPT's checkpoints, in its order."""
MAX_BYTES = 65_536
PADDED_GPT2_VOCABULARY = 50304
DEFAULTS: dict[str, Any] = {
    **{"eval_interval": 2000, "eval_iters": 200, "dataset": "openwebtext"},
    **{"gradient_accumulation_steps": 40, "batch_size": 12, "block_size": 1024},
    **{"n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False},
    **{"learning_rate": 6e-4, "max_iters": 600_000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95},
    **{"grad_clip": 1.0, "decay_lr": True, "warmup_iters": 2000, "lr_decay_iters": 600_000, "min_lr": 6e-5},
    "dtype": "float32",  # nanoGPT's default depends on the GPU
}
"""Settings of nanoGPT's train.py."""
IGNORED = {
    "out_dir": "use --run_dir for the folder of the results",
    "log_interval": "every step is recorded",
    "always_save_checkpoint": "the newest checkpoints are kept with the best",
    **dict.fromkeys(("wandb_log", "wandb_project", "wandb_run_name"), "a run writes its own report"),
    **dict.fromkeys(("backend", "device"), "use --platform"),
    "compile": "use --layout.compile",
}
"""Settings of nanoGPT without effect here, and why."""
FLAGS = {
    **{name: [f"{section}.{name}"] for name, section in FIELDS.items()},
    "eval_interval": ["train.eval_interval", "checkpoint.every"],  # nanoGPT saves when it evaluates
    "eval_iters": ["train.eval_iters"],
}
"""Flag of nanoGPT -> fields of an experiment."""
ONLY_EVALUATES = "eval_only = True: a run here trains: leave it out"
DTYPE = "dtype: float32; nanoGPT uses bfloat16 if it can: --precision.dtype bfloat16"


class Config(NamedTuple):
    """One of nanoGPT's config files."""

    experiment: Experiment
    init_from: str
    """Weights to begin with, which the file does not contain; '' for none."""
    notes: list[str]
    """Ignored settings, and why."""


def experiment_of(settings: Mapping[str, Any], *, base: Experiment) -> Experiment:
    """The experiment of nanoGPT's settings, and of `base` for all other fields. Raises ExperimentError."""
    sections = msgspec.to_builtins(base)
    sections["optimizer"] |= {"name": "adamw", "momentum": 0.0}
    for name, section in FIELDS.items():
        if name in settings:
            value, is_switch = settings[name], isinstance(sections[section][name], bool)
            sections[section][name] = bool(value) if is_switch and value in (0, 1) else value
    try:
        return checked(sections)
    except ExperimentError as error:
        raise ExperimentError(f"nanoGPT's settings: {error}") from None


def settings_of(experiment: Experiment, *, only_model: bool = False) -> dict[str, Any]:
    """nanoGPT's settings of an experiment, or of its model only."""
    sections = msgspec.to_builtins(experiment)
    if only_model:
        return {name: sections["model"][name] for name in MODEL_ARGS}
    settings = {name: sections[section][name] for name, section in FIELDS.items()}
    return {**settings, "dataset": Path(experiment.data.source).name}  # a folder in nanoGPT's data/


def is_config(name: str) -> bool:
    """Whether a name is a nanoGPT config file, by its suffix."""
    return Path(name).suffix == ".py"


def load_experiment(name: str) -> Experiment:
    """An experiment: a name, a TOML file, or one of nanoGPT's config files. Raises ExperimentError."""
    return read_config(Path(name)).experiment if is_config(name) else load(name)


def read_config(path: Path) -> Config:
    """Read one of nanoGPT's config files. Raises ExperimentError."""
    given = read_assignments(path)
    known = DEFAULTS.keys() | IGNORED.keys() | {"init_from", "eval_only"}
    if unknown := sorted(given.keys() - known):
        raise ExperimentError(f"{path}: {unknown[0]}: nanoGPT has no such setting: leave it out")
    if given.get("eval_only"):
        raise ExperimentError(f"{path}: {ONLY_EVALUATES}")
    settings = {**DEFAULTS, **given}
    source, settings["vocab_size"] = _data_of(path, str(settings["dataset"]))
    every = settings["eval_interval"]
    more = {
        "data": {"source": source},
        "train": {"eval_interval": every, "eval_iters": settings["eval_iters"]},
        "checkpoint": {"every": every, "keep": 1},
    }
    try:
        experiment = revalidate(edited(experiment_of(settings, base=Experiment()), more))
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from None
    notes = [f"{name}: {IGNORED[name]}" for name in given if name in IGNORED]
    notes += [DTYPE] if "dtype" not in given else []
    begin = str(given.get("init_from", "scratch"))
    return Config(experiment, "" if begin == "scratch" else begin, notes)


def translate_flags(name: str, words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words after a config file, with our flags for nanoGPT's; and notes on ignored flags.

    Raises ExperimentError: a flag that cannot work.
    """
    found, notes = list[str](), list[str]()
    for word in words:
        setting, has_value, value = word.removeprefix("--").partition("=")
        fields = FLAGS.get(setting, [])
        if not (word.startswith("--") and has_value):
            found.append(word)
        elif setting in IGNORED:
            notes.append(f"{setting}: {IGNORED[setting]}")
        elif setting == "eval_only":
            if value != "False":
                raise ExperimentError(f"{name}: {ONLY_EVALUATES}")
        elif setting == "dataset":
            source, vocabulary = _data_of(Path(name), value)
            found += [f"--data.source={source}", f"--model.vocab_size={vocabulary}"]
        elif value in ("True", "False") and fields:
            found += [f"--{field if value == 'True' else field.replace('.', '.no_')}" for field in fields]
        else:
            found += [f"--{field}={value}" for field in fields] or [word]
    return found, notes


def _data_of(path: Path, dataset: str) -> tuple[str, int]:
    """The folder of a dataset, near nanoGPT's config folder or here, and the size of its vocabulary."""
    source = path.absolute().parent.parent / "data" / dataset
    source = source if source.is_dir() else Path("data") / dataset
    meta = source / META
    return str(source), alphabet_size(meta) if meta.is_file() else PADDED_GPT2_VOCABULARY


def read_assignments(path: Path) -> dict[str, Any]:
    """The names that a file assigns literals to. Raises ExperimentError: the file has other statements."""
    if why := why_not_readable(path):
        raise ExperimentError(f"{path} {why}")
    if path.stat().st_size > MAX_BYTES:
        raise ExperimentError(f"{path}: longer than {MAX_BYTES} bytes: it is not a config file")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return dict(found for statement in tree.body for found in _assignment(statement, path))
    except ExperimentError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ExperimentError(f"{path}{line}: it cannot be read: {error}") from None


def _assignment(statement: ast.stmt, path: Path) -> list[tuple[str, Any]]:
    """A name and its value; nothing for a docstring or an import. Ignored settings may be computed."""
    where = f"{path}, line {statement.lineno}"
    match statement:
        case ast.Import() | ast.Expr(value=ast.Constant()):
            return []
        case ast.Assign(targets=[ast.Name(id=name)]) if name in IGNORED:
            return [(name, None)]
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return [(name, _literal(value, where))]
    raise ExperimentError(f"{where}: only assignments such as n_layer = 6 are read, and nothing is executed")


def _literal(value: ast.expr, where: str) -> Any:
    match value:
        case ast.Constant(value=int() | float() | str() | bool() as constant):
            return constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            numbers = _literal(left, where), _literal(right, where)
            if all(isinstance(number, int | float) for number in numbers):
                return numbers[0] * numbers[1]
    raise ExperimentError(f"{where}: only literals and products of numbers are read, and nothing is executed")
