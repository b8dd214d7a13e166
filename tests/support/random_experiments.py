"""Legal experiments drawn at random, and engines that accept each: what nobody thought of is run, too.

The draw is free; what cannot work is refused by the project's own checks and by each engine's declaration,
and drawn again. So a refusal that is missing shows as a run that fails, and one too many as an engine that is
not there. What is left out on purpose is arithmetic on which no two correct programs agree: see `_settings`.
"""

import itertools
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import Experiment, ExperimentError, revalidate, to_toml
from compare.studies import presets

SEED = 20260
DEVICES = (1, 2, 2, 3, 4, 4, 6, 8)
LAYOUTS, SETTINGS = 100, 200
"""Layouts that are tried, and settings with each: the hardest, of eight devices, fit one in some fifty."""
SIXTEEN_BITS, MANY_TOKENS = ("bfloat16", "float16"), 200
"""Over fewer tokens rounding in 16 bits does not average out: over 36, losses part by 2e-5 in float16."""


class Drawn(NamedTuple):
    """A legal experiment, and who can train it."""

    number: int
    """From 0, of its seed."""
    experiment: Experiment
    engines: list[str]


def experiments(seed: int = SEED) -> Iterator[Drawn]:
    """Endless legal experiments, each with two engines or more; the same for a seed, each by its number."""
    return (experiment_of(seed, number) for number in itertools.count())


def experiment_of(seed: int, number: int) -> Drawn:
    """The experiment of this number. Raises RuntimeError: nothing that was drawn is legal."""
    generator = random.Random(f"{seed} {number}")
    for _ in range(LAYOUTS):
        layout = _layout(generator)
        for _ in range(SETTINGS):
            try:
                drawn = {**_settings(generator), "layout": layout}
                experiment = revalidate(msgspec.convert(drawn, Experiment))
            except (ExperimentError, msgspec.ValidationError):
                continue
            if experiment.precision.dtype in SIXTEEN_BITS and experiment.tokens_per_step < MANY_TOKENS:
                continue
            engines = accepting(experiment)
            if len(engines) > 1:
                return Drawn(number, experiment, engines)
    raise RuntimeError(f"none of {LAYOUTS * SETTINGS} draws is legal")


def accepting(experiment: Experiment) -> list[str]:
    """The studied engines that do not refuse an experiment."""
    able = []
    for name in STUDIED:
        try:
            ENGINES[name].require_experiment(experiment)
        except ExperimentError:
            continue
        able.append(name)
    return able


def _settings(generator: random.Random) -> dict[str, Any]:
    """All sections but the layout; they may be illegal with it.

    Left out, because rounding decides there and engines part without a mistake: beta2 = 0 and a tiny eps
    (Adam then moves a weight by lr times the sign of its gradient, and that of a key bias is rounding),
    LayerNorms of a few elements (which are signs, and with dropout all alike), a beta1 or a rate at which
    training explodes, dropout that leaves no gradient, a loss scale at whose edge one engine alone overflows,
    and in 16 bits a rate of 5e-3: after one update norms part by a hundredth on one device, too.
    """
    pick, flip = generator.choice, lambda share: generator.random() < share
    heads = pick((1, 2, 3, 4, 5, 6, 8))
    model = {
        "n_layer": pick((1, 2, 3, 4, 6, 8)),
        "n_head": heads,
        "n_embd": heads * pick((1, 2, 3, 4, 5, 8)),
        "block_size": pick((1, 2, 3, 5, 8, 12, 16, 24)),
        "vocab_size": pick((2, 3, 11, 37, 64, 100, 256)),
        "bias": flip(0.5),
        "dropout": pick((0.0, 0.0, 0.1, 0.3)),
        "activation": pick(("gelu", "gelu_tanh")),
        "norm_eps": pick((1e-5, 1e-5, 1e-6, 1e-3)),
    }
    if model["n_embd"] < 8:
        model["n_embd"] *= 8
    optimizer: dict[str, Any] = {
        "name": pick(("adamw", "adamw", "adamw", "sgd")),
        "learning_rate": pick((1e-3, 1e-3, 3e-4, 5e-3)),
        "decay_lr": flip(0.7),
        "warmup_iters": pick((0, 1, 4)),
        "lr_decay_iters": pick((5, 20)),
        "weight_decay": pick((0.0, 0.1, 0.5)),
        "decay": pick(("matrices", "all")),
        "beta1": pick((0.9, 0.5)),
        "beta2": pick((0.95, 0.99)),
        "grad_clip": pick((0.0, 1.0, 0.1)),
    }
    if optimizer["name"] == "sgd":
        optimizer["momentum"] = pick((0.0, 0.9))
    train = {
        "max_iters": pick((3, 4, 6)),
        "batch_size": pick((1, 2, 3, 4, 6, 8, 12, 16)),
        "gradient_accumulation_steps": pick((1, 1, 2, 3)),
        "loss_chunks": pick((1, 1, 1, 2, 3)),
        "eval_interval": pick((0, 0, 2)),
        "eval_iters": pick((1, 2)),
        "seed": generator.randrange(2**31),
    }
    precision = {"dtype": pick(("float64", "float64", "float64", "float32", "bfloat16", "float16"))}
    data = {"source": "synthetic"}
    if precision["dtype"] in SIXTEEN_BITS:
        optimizer["learning_rate"] = min(optimizer["learning_rate"], 1e-3)
    return {"model": model, "optimizer": optimizer, "train": train, "precision": precision, "data": data}


def _layout(generator: random.Random) -> dict[str, Any]:
    """A preset's fields, or degrees of their own, with settings that go with any."""
    pick, flip = generator.choice, lambda share: generator.random() < share
    devices = pick(DEVICES)
    chosen = {
        "gradient_sync": pick(("naive", "flat", "overlapped", "bucketed", "bucketed", "bucketed")),
        "bucket_mb": pick((0.001, 0.01, 25.0)),
        "remat": pick(("auto", "none", "dots", "full")),
        "offload": pick(("none", "none", "none", "optimizer")),
    }
    if flip(0.5):
        try:
            return chosen | presets._fields(pick(list(presets.PRESETS)), devices)
        except ExperimentError:  # a preset that cannot spread over so many
            pass
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp"), 1)
    for factor in {1: (), 2: (2,), 3: (3,), 4: (2, 2), 6: (2, 3), 8: (2, 2, 2)}[devices]:
        degrees[pick(list(degrees))] *= factor
    if degrees["dp_shard"] > 1:
        chosen["zero"] = pick((1, 2, 3, 3))
        chosen["reshard_after_forward"] = chosen["zero"] != 3 or flip(0.7)
    if degrees["tp"] > 1:
        chosen["sequence_parallel"] = flip(0.5)
    if degrees["pp"] > 1:
        chosen["schedule"] = pick(("gpipe", "1f1b", "interleaved", "zero_bubble"))
        chosen["chunks"] = pick((2, 3)) if chosen["schedule"] == "interleaved" else 1
        chosen["microbatches"] = pick((1, 2, 3, 4))
    return chosen | degrees


def arguments_of(drawn: Drawn, folder: Path) -> list[str]:
    """Arguments of `shardpair`, to be run in this folder, which is given the experiment's file."""
    name = f"random-{drawn.number}"
    (folder / f"{name}.toml").write_text(to_toml(drawn.experiment))
    return ["run", f"{name}.toml", "--run_dir", name, "--engines", *drawn.engines, "--quiet"]


def what_went_wrong(done: subprocess.CompletedProcess) -> str:
    """'' if the engines agree, else the verdict, or the last word."""
    if not done.returncode:
        return ""
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    verdict = [line for line in said if "FAIL" in line or "INCOMPLETE" in line]
    return f"exit code {done.returncode}: {(verdict or said or ['not a word'])[-1]}"
