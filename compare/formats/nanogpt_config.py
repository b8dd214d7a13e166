"""nanoGPT's config files, such as config/train_shakespeare_char.py, as experiments.

A file is parsed and never executed. It may contain assignments of literals, and products of literals (5 * 8).
Missing settings have the defaults of nanoGPT's train.py. Ignored settings are listed. nanoGPT's flags may
follow the file: `--max_iters=10`.
"""

import ast
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from compare.formats.nanogpt_settings import FIELDS, experiment_of
from compare.formats.tokens import META, alphabet_size
from compare.spec.experiment import Experiment, ExperimentError, edited, load, revalidate
from compare.system.disk import why_not_readable

MAX_BYTES = 65_536
PADDED_GPT2_VOCABULARY = 50304
DEFAULTS: dict[str, Any] = {
    **{"eval_interval": 2000, "eval_iters": 200, "dataset": "openwebtext"},
    **{"gradient_accumulation_steps": 40, "batch_size": 12, "block_size": 1024},
    **{"n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False},
    **{"learning_rate": 6e-4, "max_iters": 600_000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95},
    **{"grad_clip": 1.0, "decay_lr": True, "warmup_iters": 2000, "lr_decay_iters": 600_000, "min_lr": 6e-5},
    "dtype": "float32",  # nanoGPT's default is what its GPU has
}
"""Defaults of nanoGPT's train.py."""
WITHOUT_MEANING = {
    "out_dir": "--run_dir sets the folder of the results",
    "log_interval": "every step is recorded",
    "always_save_checkpoint": "the newest and the best checkpoint are always kept",
    **dict.fromkeys(("wandb_log", "wandb_project", "wandb_run_name"), "a run has a report of its own"),
    **dict.fromkeys(("backend", "device"), "--platform selects the device"),
    "compile": "each engine decides; see --layout.compile",
}
"""Settings of nanoGPT that change nothing here, and why."""
OURS = {
    **{name: [f"{section}.{name}"] for name, section in FIELDS.items()},
    "eval_interval": ["train.eval_interval", "checkpoint.every"],  # nanoGPT saves when it evaluates
    "eval_iters": ["train.eval_iters"],
}
"""The fields here that a flag of nanoGPT sets."""
ONLY_EVALUATES = "eval_only = True: a run here trains; leave it out"
DTYPE = "dtype: float32; nanoGPT takes bfloat16 where it can: --precision.dtype bfloat16"


def is_config(name: str) -> bool:
    """True for one of nanoGPT's files, by its suffix."""
    return Path(name).suffix == ".py"


def load_experiment(name: str) -> Experiment:
    """An experiment: a name, a TOML file, or one of nanoGPT's config files. Raises ExperimentError."""
    return load_config(Path(name))[0] if is_config(name) else load(name)


def begins_with(name: str) -> str:
    """Weights that a config file of nanoGPT begins with, which are not in it; '' for none."""
    begin = str(read_assignments(Path(name)).get("init_from", "scratch")) if is_config(name) else "scratch"
    return "" if begin == "scratch" else begin


def notes_on(name: str, given: Container[str]) -> list[str]:
    """Ignored settings of a nanoGPT config file, with reasons, given these flags; [] for other files."""
    notes = load_config(Path(name))[1] if is_config(name) else []
    return [note for note in notes if note != DTYPE or "precision.dtype" not in given]


def in_our_words(name: str, line: Iterable[str]) -> tuple[list[str], list[str]]:
    """A command line behind the config file `name`, with our flags in place of nanoGPT's `--name=value`.

    Returns what of them has no meaning here, too. Raises ExperimentError: one asks to evaluate alone.
    """
    words, notes = list[str](), list[str]()
    for word in line:
        setting, is_given, value = word.removeprefix("--").partition("=")
        fields = OURS.get(setting, [])
        if not (word.startswith("--") and is_given):
            words.append(word)
        elif setting in WITHOUT_MEANING:
            notes.append(f"{setting}: {WITHOUT_MEANING[setting]}")
        elif setting == "eval_only":
            if value != "False":
                raise ExperimentError(f"{name}: {ONLY_EVALUATES}")
        elif setting == "dataset":
            source, vocabulary = _data_of(Path(name), value)
            words += [f"--data.source={source}", f"--model.vocab_size={vocabulary}"]
        elif value in ("True", "False") and fields:
            words += [f"--{field if value == 'True' else field.replace('.', '.no_')}" for field in fields]
        else:
            words += [f"--{field}={value}" for field in fields] or [word]
    return words, notes


def load_config(path: Path) -> tuple[Experiment, list[str]]:
    """The experiment that one of nanoGPT's config files describes, and what of it has no meaning here.

    Raises ExperimentError.
    """
    given = read_assignments(path)
    known = DEFAULTS.keys() | WITHOUT_MEANING.keys() | {"init_from", "eval_only"}
    if unknown := sorted(given.keys() - known):
        raise ExperimentError(f"{path}: {unknown[0]}: nanoGPT has no such setting")
    if given.get("eval_only"):
        raise ExperimentError(f"{path}: {ONLY_EVALUATES}")
    settings = {**DEFAULTS, **given}
    every = settings["eval_interval"]
    source, settings["vocab_size"] = _data_of(path, str(settings["dataset"]))
    plain = {name: settings[name] for name in FIELDS}
    more = {
        "data": {"source": source},
        "train": {"eval_interval": every, "eval_iters": settings["eval_iters"]},
        "checkpoint": {"every": every, "keep": 1},
    }
    try:
        experiment = revalidate(edited(experiment_of(plain, base=Experiment()), more))
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from None
    notes = [f"{name}: {WITHOUT_MEANING[name]}" for name in given if name in WITHOUT_MEANING]
    if "dtype" not in given:
        notes.append(DTYPE)
    return experiment, notes


def _data_of(path: Path, dataset: str) -> tuple[str, int]:
    """Folder of a dataset, next to nanoGPT's config folder or here, and the size of its vocabulary."""
    source = path.absolute().parent.parent / "data" / dataset
    source = source if source.is_dir() else Path("data") / dataset
    meta = source / META
    return str(source), alphabet_size(meta) if meta.is_file() else PADDED_GPT2_VOCABULARY


def read_assignments(path: Path) -> dict[str, Any]:
    """The names that a file assigns literals to. Raises ExperimentError: it has anything else."""
    if why := why_not_readable(path):
        raise ExperimentError(f"{path} {why}")
    if path.stat().st_size > MAX_BYTES:
        raise ExperimentError(f"{path}: longer than {MAX_BYTES} bytes, which no config is")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return dict(found for statement in tree.body for found in _assignment(statement, path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ExperimentError):
            raise
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ExperimentError(f"{path}{line}: it cannot be read: {error}") from None


def _assignment(statement: ast.stmt, path: Path) -> list[tuple[str, Any]]:
    """A name and its value; none of a docstring, or of an import for names without meaning."""
    match statement:
        case ast.Import() | ast.Expr(value=ast.Constant()):
            return []
        case ast.Assign(targets=[ast.Name(id=name)]) if name in WITHOUT_MEANING:
            return [(name, None)]  # ignored, so any expression is allowed
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return [(name, _literal(value, f"{path}, line {statement.lineno}"))]
    where = f"{path}, line {statement.lineno}"
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
