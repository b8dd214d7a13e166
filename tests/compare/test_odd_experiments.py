"""Experiments far from every default, once drawn at random.

A draw must avoid settings under which correct programs differ. With beta2 = 0 and a tiny eps, Adam moves a
weight by the sign of its gradient. The sign of a key bias's gradient is rounding. Others are LayerNorms
of a few elements, rates at which training explodes, and dropout that leaves no gradient.
"""

import pytest

from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import Experiment, ExperimentError, edited, to_toml

SIZES = {"n_layer": 2, "n_head": 8, "n_embd": 32, "vocab_size": 11}
MODEL = {**SIZES, "activation": "gelu_tanh", "norm_eps": 1e-6}
ODD = {
    "one position": {
        "model": {**MODEL, "block_size": 1, "bias": False, "dropout": 0.3},
        "optimizer": {"name": "sgd", "warmup_iters": 0, "lr_decay_iters": 5, "grad_clip": 0.1},
        "train": {"max_iters": 4, "batch_size": 2, "seed": 2027837527},
        "layout": {"dp_shard": 2, "zero": 3, "bucket_mb": 0.001, "remat": "dots", "offload": "optimizer"},
    },
    "decay of all": {
        "model": {**MODEL, "block_size": 5, "bias": True},
        "optimizer": {"learning_rate": 5e-3, "decay_lr": False, "warmup_iters": 4, "decay": "all"},
        "train": {"max_iters": 6, "batch_size": 12, "seed": 1220455187},
        "layout": {"pp": 2, "schedule": "zero_bubble", "microbatches": 2, "bucket_mb": 0.01, "remat": "full"},
    },
}


def accepts(engine: str, experiment: Experiment) -> bool:
    try:
        ENGINES[engine].require_experiment(experiment)
    except ExperimentError:
        return False
    return True


@pytest.mark.parametrize("name", ODD)
def test_engines_agree_on_odd_experiments(shardpair, name):
    elsewhere = {"data": {"source": "synthetic"}, "precision": {"dtype": "float64"}}
    experiment = edited(Experiment(), ODD[name] | elsewhere)
    engines = [name for name in STUDIED if accepts(name, experiment)]
    assert len(engines) > 1
    (shardpair.folder / "odd.toml").write_text(to_toml(experiment))
    done = shardpair("run", "odd.toml", "--engines", *engines, "--quiet")
    assert done.returncode == 0, (done.stdout, done.stderr)
