"""nanoGPT's settings and config files, such as config/train_shakespeare_char.py, as experiments.

A config file is parsed and never executed. It may contain only assignments of literals, of names that stand
above, and of arithmetic on numbers (learning_rate / 10). Missing settings have the defaults of nanoGPT's
train.py. nanoGPT's flags after a config file (`--max_iters=10`) are also read.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from compare.formats.gpt2_names import require_gpt2
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
OF_FORKS = {"seed", "vocab_size"}
"""Settings that forks of nanoGPT have."""
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
}
"""Settings of nanoGPT without effect here, and why."""
COMPILE = "compile"
KNOWN = {*DEFAULTS, *IGNORED, *OF_FORKS, COMPILE, "init_from", "eval_only"}
FLAGS = {
    **{name: [f"{section}.{name}"] for name, section in FIELDS.items()},
    "eval_interval": ["train.eval_interval", "checkpoint.every"],  # nanoGPT saves when it evaluates
    "eval_iters": ["train.eval_iters"],
    "seed": ["train.seed"],
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
            value, default = settings[name], sections[section][name]
            if isinstance(default, bool) and value in (0, 1):
                value = bool(value)
            elif isinstance(default, int) and isinstance(value, float) and value.is_integer():
                value = int(value)  # nanoGPT takes 4.0 and 6e5 for a count
            sections[section][name] = value
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


def require_nanogpt(experiment: Experiment, origin: str) -> None:
    """Reject a model or an optimizer that nanoGPT lacks. Raises ExperimentError, which names the option."""
    model, optimizer = experiment.model, experiment.optimizer
    require_gpt2(model, origin)
    for key, value, nanogpts in (
        ("optimizer.name", optimizer.name, "adamw"),
        ("optimizer.decay", optimizer.decay, "matrices"),
        ("model.activation", model.activation, "gelu"),
        ("model.norm_eps", model.norm_eps, 1e-5),
    ):
        if value != nanogpts:
            why = f"{origin}: {key} = {value}, and nanoGPT has only {nanogpts}"
            raise ExperimentError(f"{why}: convert it --to huggingface or weights")


def is_config(name: str) -> bool:
    """Whether a name is a nanoGPT config file, by its suffix."""
    return Path(name).suffix == ".py"


def load_experiment(name: str) -> Experiment:
    """An experiment: a name, a TOML file, or one of nanoGPT's config files. Raises ExperimentError."""
    return read_config(Path(name)).experiment if is_config(name) else load(name)


def read_config(path: Path) -> Config:
    """Read one of nanoGPT's config files. Raises ExperimentError."""
    given = read_assignments(path)
    if unknown := sorted(given.keys() - KNOWN):
        raise ExperimentError(f"{path}: {unknown[0]}: nanoGPT has no such setting: leave it out")
    if given.get("eval_only"):
        raise ExperimentError(f"{path}: {ONLY_EVALUATES}")
    settings = {**DEFAULTS, **given}
    source, vocabulary = _data_of(path, str(settings["dataset"]))
    settings.setdefault("vocab_size", vocabulary)
    every = settings["eval_interval"]
    more = {
        "data": {"source": source},
        "train": {
            "eval_interval": every,
            "eval_iters": settings["eval_iters"],
            **({"seed": given["seed"]} if "seed" in given else {}),
        },
        "checkpoint": {"every": every, "keep": 1},
    }
    # A loss scale is a constant of a compiled program.
    if COMPILE in given and not (given[COMPILE] and settings["dtype"] == "float16"):
        more["layout"] = {"compile": "inductor" if given[COMPILE] else "none"}
    try:
        experiment = revalidate(edited(experiment_of(settings, base=Experiment()), more))
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from None
    notes = [f"{name}: {IGNORED[name]}" for name in given if name in IGNORED]
    notes += [DTYPE] if "dtype" not in given else []
    begin = str(given.get("init_from", "scratch"))
    return Config(experiment, "" if begin == "scratch" else begin, notes)


def sizes_in(path: Path) -> set[str]:
    """Fields of the model that a config file sets, such as `model.n_layer`. Raises ExperimentError."""
    return {f"model.{name}" for name in read_assignments(path) if name in MODEL_ARGS}


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
        elif setting == COMPILE and value == "True":
            found.append("--layout.compile=inductor")
        elif setting == COMPILE:
            notes.append("compile: nothing is compiled by default; see --layout.compile")
        elif setting == "eval_only":
            if value != "False":
                raise ExperimentError(f"{name}: {ONLY_EVALUATES}")
        elif setting == "init_from" and value == "scratch":
            continue
        elif setting == "init_from" and (value == "resume" or value.startswith("gpt2")):
            what = "--resume RUN_DIR" if value == "resume" else "--init_from with the folder of its weights"
            raise ExperimentError(f"{name}: --init_from={value}: give {what}")
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
    """The settings that a file assigns, without names that only help to compute others.

    Raises ExperimentError: the file has other statements.
    """
    if why := why_not_readable(path):
        raise ExperimentError(f"{path} {why}")
    if path.stat().st_size > MAX_BYTES:
        raise ExperimentError(f"{path}: longer than {MAX_BYTES} bytes: it is not a config file")
    try:
        tree, found = ast.parse(path.read_text(encoding="utf-8-sig")), dict[str, Any]()
        for statement in tree.body:
            found |= _assignment(statement, path, found)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        return {name: value for name, value in found.items() if name in KNOWN or name not in used}
    except ExperimentError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ExperimentError(f"{path}{line}: it cannot be read: {error}") from None


def _assignment(statement: ast.stmt, path: Path, above: Mapping[str, Any]) -> dict[str, Any]:
    """A name and its value; nothing for a docstring or an import. Ignored settings may be computed."""
    where = f"{path}, line {statement.lineno}"
    match statement:
        case ast.Import() | ast.Expr(value=ast.Constant()):
            return {}
        case ast.Assign(targets=[ast.Name(id=name)]) if name in IGNORED:
            return {name: None}
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
        ):
            return {name: _value(value, where, above)}
    raise ExperimentError(f"{where}: only assignments such as n_layer = 6 are read, and nothing is executed")


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv},
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "min": min, "max": max}


def _value(value: ast.expr, where: str, above: Mapping[str, Any]) -> Any:
    """The value of a literal, of a name that stands above, or of arithmetic on numbers."""

    def numbers(*parts: ast.expr) -> list[Any]:
        found = [_value(part, where, above) for part in parts]
        if not all(isinstance(number, int | float) for number in found):
            raise ExperimentError(f"{where}: arithmetic is for numbers")
        return found

    try:
        match value:
            case ast.Constant(value=int() | float() | str() | bool() as constant):
                return constant
            case ast.Name(id=name) if name in above:
                return above[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -numbers(operand)[0]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](*numbers(left, right))
            case ast.Call(func=ast.Name(id=name), args=[_, *_] as parts, keywords=[]) if name in FUNCTIONS:
                return FUNCTIONS[name](*numbers(*parts))
    except (ArithmeticError, TypeError) as error:
        raise ExperimentError(f"{where}: {error}") from None
    raise ExperimentError(
        f"{where}: only literals, names that stand above, and arithmetic are read, and nothing is executed"
    )
