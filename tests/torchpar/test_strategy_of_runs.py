"""Records of right runs have no objection to their strategy, where a count is easily wrong."""

import traceback
from pathlib import Path

import pytest

from compare.contract.record import read_record
from compare.contract.request import REQUEST, Request
from compare.judge.strategy import strategy_of
from compare.spec.experiment import Experiment, edited
from compare.system.json_files import write_json
from tests.support.warm import run_forked

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
            "precision": {"dtype": "bfloat16"},
            "train": {"loss_chunks": 4},
            "layout": DDP | {"compile": "aot_eager", "remat": "dots"},
        },
    ),
}


def run_engine(folder: Path, request: Request) -> int:
    """Run a request in this process, and leave its record. Returns the exit code."""
    from torchpar.__main__ import run

    try:
        run(request, folder, None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_run_has_no_objection(tmp_path, tiny: Experiment, name):
    engine, sections = RIGHT[name]
    request = Request(engine=engine, experiment=edited(edited(tiny, FOUR), sections))
    write_json(tmp_path / REQUEST, request)
    done = run_forked(run_engine, tmp_path, request)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not strategy_of(read_record(tmp_path)).objections
