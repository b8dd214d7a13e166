"""Records of right runs have no objection to their strategy, where a count is easily wrong."""

import pytest

from compare.contract.request import Request
from compare.judge.strategy import strategy_of
from compare.spec.experiment import Experiment, edited
from tests.support.warm import run_torchpar

FOUR = {"model": {"n_layer": 4}, "train": {"max_iters": 1, "gradient_accumulation_steps": 2}}
DDP = {"dp_replicate": 2}
RIGHT = {
    "padded vocabulary": (
        "torch-library",
        {
            "model": {"vocab_size": 37},
            "data": {"source": "synthetic"},
            "layout": {"dp_shard": 2, "zero": 3},
        },
    ),
    "halves of backward": (
        "torch-manual",
        {"layout": DDP | {"pp": 2, "microbatches": 2, "schedule": "zero_bubble", "bucket_mb": 0.01}},
    ),
    "replicas of shards": ("torch-compiler", {"layout": DDP | {"dp_shard": 2, "zero": 1}}),
    "sums in 16 bits": ("torch-compiler", {"precision": {"dtype": "bfloat16"}, "layout": {"tp": 2}}),
    "compiled": (
        "torch-compiler",
        {
            "model": {"n_layer": 2},
            "precision": {"dtype": "bfloat16"},
            "train": {"loss_chunks": 4},
            "layout": DDP | {"compile": "aot_eager", "remat": "dots"},
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_run_has_no_objection(tmp_path, tiny: Experiment, name):
    engine, sections = RIGHT[name]
    record = run_torchpar(tmp_path, Request(engine=engine, experiment=edited(edited(tiny, FOUR), sections)))
    assert not strategy_of(record).objections
