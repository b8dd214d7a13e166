"""One rank of many, alone and computing nothing: it sends and keeps what a rank among others does."""

import msgspec
import pytest
from warm import run_forked, run_torchpar

from compare.contract.absent import AbsentRequest, RankAlone
from compare.contract.record import read_record
from compare.contract.request import Request
from compare.judge.ledger import line_up, mismatches
from compare.spec.experiment import Data, Experiment, Layout, Model, Precision, Train, edited

MODEL = Model(n_layer=2, n_head=8, n_embd=1024, block_size=1024, vocab_size=8192)
"""Its sizes are multiples of 1,024: no shard is padded, and padding explains no byte."""


def experiment_of(**layout) -> Experiment:
    spread = Layout(**layout)
    return Experiment(
        model=MODEL,
        data=Data(source="synthetic"),
        train=Train(batch_size=spread.data_parallel),
        precision=Precision(dtype="float32"),
        layout=spread,
    )


def _answer(request: AbsentRequest, small: int = 2**14) -> int:
    from torchpar.alone import run_alone
    from torchpar.measure import hollow

    hollow.SMALL = small
    print(msgspec.json.encode(run_alone(request)).decode())
    return 0


def run_by_itself(request: AbsentRequest, **given) -> RankAlone:
    done = run_forked(_answer, request, *given.values())
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=RankAlone)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch-manual", "torch-library"])
def test_a_rank_of_1024_sends_what_the_textbook_says(engine):
    """128 shards of 8 ranks that split each layer: fsdp_tp."""
    experiment = experiment_of(dp_shard=128, zero=3, tp=8)
    alone = run_by_itself(AbsentRequest(engine=engine, experiment=experiment))
    assert alone.ledger.problems == []
    rows = alone.ledger.rows
    flows = line_up(engine, experiment, rows)
    assert {(flow.axis, flow.role) for flow in flows} >= {("dp_shard", "gather"), ("tp", "reduce")}
    assert list(mismatches(engine, experiment, flows)) == []
    assert {row.group_size for row in rows if row.axis == "dp_shard"} == {128}


TP_SP = {"tp": 2, "sequence_parallel": True}
CASES = [
    ("torch-manual", "float64", {"dp_replicate": 2}),
    ("torch-manual", "bfloat16", {**TP_SP, "remat": "full"}),
    ("torch-library", "float64", {"dp_shard": 2, "zero": 3}),
]


@pytest.mark.parametrize(("engine", "dtype", "layout"), CASES)
def test_a_rank_alone_sends_and_keeps_what_one_of_two_does(engine, dtype, layout, tiny, tmp_path):
    """All but the smallest results of operators are left as they come."""
    given = {"layout": layout, "data": {"source": "synthetic"}, "precision": {"dtype": dtype}}
    experiment = edited(tiny, given | {"train": {"max_iters": 3, "eval_interval": 0}})
    done = run_torchpar(tmp_path / "real", Request(engine=engine, experiment=experiment, ladder=False))
    assert done.returncode == 0, done.stderr
    real = read_record(tmp_path / "real")
    request = AbsentRequest(engine=engine, experiment=experiment)
    alone = run_by_itself(request, small=16)
    assert alone.memory.peak.bytes == real.memory.devices[0].peak.bytes

    def sent(rows):
        return sorted((row.kind, row.axis, row.purpose, row.calls, row.bytes) for row in rows)

    assert sent(alone.ledger.rows) == sent(real.ledger.rows)
