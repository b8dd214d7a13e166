"""One rank of many, alone and computing nothing: it sends and keeps what a rank among others does."""

from pathlib import Path

import msgspec
import pytest
import torch
from forks import run_forked, run_torchpar

from compare.contract.rank_alone import RankAlone, RankAloneRequest, read_rank_alone_request
from compare.contract.record import read_record
from compare.contract.request import Request
from compare.judge.ledger import line_up, mismatches
from compare.judge.strategy import with_remat_resolved
from compare.spec.experiment import Data, Experiment, ExperimentError, Layout, Model, Precision, Train, edited
from torchpar.measure.hollow import HollowMode

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


def _answer(request: RankAloneRequest, small: int = 2**14) -> int:
    from torchpar.alone import run_alone
    from torchpar.measure import hollow

    hollow.SMALL = small
    print(msgspec.json.encode(run_alone(request)).decode())
    return 0


def run_by_itself(request: RankAloneRequest, folder: Path, **given) -> RankAlone:
    done = run_forked(_answer, request, *given.values(), output=folder)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=RankAlone)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch-manual", "torch-library"])
def test_a_rank_of_1024_sends_what_the_closed_form_says(engine, tmp_path):
    """128 shards of 8 ranks that split each layer: fsdp_tp."""
    experiment = experiment_of(dp_shard=128, zero=3, tp=8)
    alone = run_by_itself(RankAloneRequest(engine=engine, experiment=experiment), tmp_path / "o")
    assert alone.problems == []
    resolved = with_remat_resolved(engine, experiment)
    flows = line_up(engine, resolved, alone.rows)
    assert {(flow.axis, flow.role) for flow in flows} >= {("dp_shard", "gather"), ("tp", "reduce")}
    assert list(mismatches(engine, resolved, flows)) == []
    assert {row.group_size for row in alone.rows if row.axis == "dp_shard"} == {128}
    if engine == "torch-library":  # which is held to multiples alone
        return
    other = experiment_of(dp_shard=128, zero=2, tp=8)  # the ledger of one layout is not another's
    resolved = with_remat_resolved(engine, other)
    assert list(mismatches(engine, resolved, line_up(engine, resolved, alone.rows)))


LAYOUTS = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "fsdp": {"dp_shard": 2, "zero": 3},
    "tp_sp": {"tp": 2, "sequence_parallel": True},
    "tp_sp_full": {"tp": 2, "sequence_parallel": True, "remat": "full"},
}


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("torch-manual", name) for name in LAYOUTS),
        *(("torch-library", name) for name in ("fsdp", "tp_sp", "tp_sp_full")),
    ],
)
def test_a_rank_alone_sends_and_keeps_what_one_of_two_does(engine, name, tiny, tmp_path):
    """All but the smallest results of operators are left as they come."""
    train = {"train": {"max_iters": 3, "eval_interval": 0}}
    dtype = "bfloat16" if name == "tp_sp_full" else "float64"
    given = {"layout": LAYOUTS[name], "data": {"source": "synthetic"}, "precision": {"dtype": dtype}}
    experiment = edited(tiny, given | train)
    done = run_torchpar(tmp_path / "real", Request(engine=engine, experiment=experiment, ladder=False))
    assert done.returncode == 0, done.stderr
    real = read_record(tmp_path / "real")
    request = RankAloneRequest(engine=engine, experiment=experiment)
    alone = run_by_itself(request, tmp_path / "alone", small=16)
    assert alone.memory.peak.bytes == real.memory.devices[0].peak.bytes

    def sent(rows):
        return sorted((row.kind, row.axis, row.purpose, row.calls, row.bytes) for row in rows)

    assert sent(alone.rows) == sent(real.ledger.rows)
    resolved = with_remat_resolved(engine, experiment)
    assert list(mismatches(engine, resolved, line_up(engine, resolved, real.ledger.rows))) == []


def test_what_is_large_is_not_computed_and_what_is_small_is():
    """Zeros instead of sums; and a tensor that is written to stays as it is."""
    large, small = torch.ones(200, 200), torch.ones(3)
    with HollowMode():
        assert not (large + large).any()
        assert (small + small).tolist() == [2, 2, 2]
        assert float(large.sum()) == 0
        assert large.mul_(2) is large
        assert large.view(-1)[:2].tolist() == [1, 1]
        assert not torch.full((200, 200), 7.0).any()
        assert torch.arange(40_000).sum() == 0
        assert torch.nn.functional.layer_norm(large, (200,)).shape == (200, 200)
    assert (large + large)[0, 0] == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "--alone: "),
        ('{"engine": "torch-manual"}', "experiment"),
        ('{"engine": "x", "speed": 1}', "speed"),
    ],
)
def test_a_request_that_is_none_is_refused_in_a_line(text, says):
    with pytest.raises(ExperimentError, match=says) as error:
        read_rank_alone_request(text)
    assert "\n" not in str(error.value)


def test_a_rank_has_others():
    for layout, rank in ((Layout(), 0), (Layout(dp_replicate=2), 2)):
        request = RankAloneRequest(engine="torch-manual", experiment=Experiment(layout=layout), rank=rank)
        with pytest.raises(ExperimentError, match="there must be others"):
            read_rank_alone_request(msgspec.json.encode(request).decode())
