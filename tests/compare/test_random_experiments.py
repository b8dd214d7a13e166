"""Experiments that nobody chose, through the command: whatever is legal trains, and engines agree on it.

The draw is free; what cannot work is refused by the project's own checks and by each engine's declaration,
and drawn again. So a refusal that is missing shows as a run that fails, and one too many as an engine that is
not there. What is left out on purpose is arithmetic on which no two correct programs agree.
"""

import random
from typing import Any

import msgspec
import pytest

from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import Experiment, ExperimentError, revalidate, to_toml


def settings_of(generator: random.Random) -> dict[str, Any]:
    """All sections but the layout; they may be illegal with it.

    Left out, because rounding decides there and engines part without a mistake: beta2 = 0 and a tiny eps
    (Adam then moves a weight by lr times the sign of its gradient, and that of a key bias is rounding),
    LayerNorms of a few elements (which are signs, and with dropout all alike), a beta1 or a rate at which
    training explodes, and dropout that leaves no gradient.
    """
    pick, flip = generator.choice, lambda share: generator.random() < share
    heads = pick((1, 2, 3, 4, 5, 6, 8))
    model = {
        "n_layer": pick((1, 2)),
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
        "seed": generator.randrange(2**31),
    }
    precision = {"dtype": "float64"}
    data = {"source": "synthetic"}
    return {"model": model, "optimizer": optimizer, "train": train, "precision": precision, "data": data}


def layout_of(generator: random.Random) -> dict[str, Any]:
    """Two devices along an axis, with settings that go with it and with any."""
    pick, flip = generator.choice, lambda share: generator.random() < share
    chosen = {
        "gradient_sync": pick(("naive", "flat", "overlapped", "bucketed", "bucketed", "bucketed")),
        "bucket_mb": pick((0.001, 0.01, 25.0)),
        "remat": pick(("auto", "none", "dots", "full")),
        "offload": pick(("none", "none", "none", "optimizer")),
    }
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp"), 1)
    degrees[pick(list(degrees))] = 2
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


def accepts(engine: str, experiment: Experiment) -> bool:
    try:
        ENGINES[engine].require_experiment(experiment)
    except ExperimentError:
        return False
    return True


def drawn(number: int) -> tuple[Experiment, list[str]]:
    """A legal experiment of two devices, always the same of a number, and the engines that take it."""
    generator = random.Random(number)
    while True:
        fields = {**settings_of(generator), "layout": layout_of(generator)}
        try:
            experiment = revalidate(msgspec.convert(fields, Experiment))
        except (ExperimentError, msgspec.ValidationError):
            continue
        engines = [name for name in STUDIED if accepts(name, experiment)]
        if len(engines) > 1:
            return experiment, engines


@pytest.mark.parametrize("number", range(2))
def test_engines_agree_on_what_nobody_chose(shardpair, number):
    experiment, engines = drawn(number)
    (shardpair.folder / "random.toml").write_text(to_toml(experiment))
    done = shardpair("run", "random.toml", "--engines", *engines, "--quiet")
    assert done.returncode == 0, (to_toml(experiment), done.stdout, done.stderr)
