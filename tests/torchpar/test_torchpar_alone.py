"""One rank of 1,024, alone under PyTorch's fake process group: its ledger, to the byte of the closed form."""

import msgspec
import pytest
from forks import run_forked

from compare.contract.rank_alone import RankAlone, RankAloneRequest, read_rank_alone_request
from compare.judge.ledger_lines import line_up
from compare.judge.strategy import with_remat_resolved
from compare.spec.experiment import Data, Experiment, ExperimentError, Layout, Model, Precision, Train

MODEL = Model(n_layer=2, n_head=8, n_embd=1024, block_size=16, vocab_size=8192)
"""Its sizes are multiples of 1,024, so that no shard is padded."""


def experiment_of(**layout) -> Experiment:
    spread = Layout(**layout)
    return Experiment(
        model=MODEL,
        data=Data(source="synthetic"),
        train=Train(batch_size=spread.data_parallel),
        precision=Precision(dtype="float32"),
        layout=spread,
    )


def _answer(request: RankAloneRequest) -> int:
    from torchpar.alone import run_alone

    print(msgspec.json.encode(run_alone(request)).decode())
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch-manual", "torch-library"])
def test_a_rank_of_1024_sends_what_the_closed_form_says(engine, tmp_path):
    """128 shards of 8 ranks that split each layer: fsdp_tp."""
    experiment = experiment_of(dp_shard=128, zero=3, tp=8)
    done = run_forked(_answer, RankAloneRequest(engine=engine, experiment=experiment), output=tmp_path / "o")
    assert done.returncode == 0, done.stderr
    alone = msgspec.json.decode(done.stdout.splitlines()[-1], type=RankAlone)
    lines = line_up(engine, with_remat_resolved(engine, experiment), alone.rows)
    assert {(line.axis, line.kind) for line in lines} >= {("dp_shard", "all_gather"), ("tp", "all_reduce")}
    assert all(line.is_explained for line in lines), lines
    if engine == "torch-manual":
        assert all(line.state == "expected" for line in lines)
    assert {row.group_size for row in alone.rows if row.axis == "dp_shard"} == {128}
    other = experiment_of(dp_shard=128, zero=2, tp=8)  # the ledger of one layout is not another's
    assert any(
        not line.is_explained for line in line_up(engine, with_remat_resolved(engine, other), alone.rows)
    )


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
