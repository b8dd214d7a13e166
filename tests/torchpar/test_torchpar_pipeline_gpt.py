"""A GPT in a pipeline: its tied weight."""

from contextlib import nullcontext

import pytest
import torch

from compare.numerics.parameters import initial_parameters
from compare.spec.axes import PP, ROWS
from compare.spec.experiment import Experiment, Layout, Model, Train
from tests.support.gpt_steps import make_parallel, update
from tests.support.ranks import on_ranks
from torchpar.batch import RankBatch
from torchpar.manual import make_engine
from torchpar.model import GPT
from torchpar.tied_weights import TIED
from torchpar.weights import load_weights

SMALL = Model(n_layer=4, n_head=2, n_embd=8, block_size=8, vocab_size=16, bias=True)


LAYOUTS = {
    "pp": Layout(pp=4, microbatches=4),
    "zero1_pp": Layout(pp=2, dp_shard=2, zero=1, microbatches=2),
    "fsdp_pp": Layout(pp=2, dp_shard=2, zero=3, microbatches=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks
def test_tied_copies_stay_equal(rank: int, name: str) -> None:
    layout = LAYOUTS[name]
    experiment = Experiment(model=SMALL, train=Train(batch_size=4), layout=layout)
    model = GPT(SMALL)
    load_weights(model, initial_parameters(experiment))
    parallel, mesh = make_parallel(make_engine, layout, rank, experiment, model)
    assert parallel.run_pipeline
    data, ids = mesh.joined(*ROWS), torch.arange(2 * 4 * 8).view(2, 4, 8) % 16
    rows = ids.chunk(data.size, dim=1)[data.rank]
    for step in range(3):
        parallel.run_pipeline(RankBatch(rows, rows), nullcontext)
        parallel.finish_gradients()
        update(parallel, experiment.optimizer, step)
    mine = parallel.weights().get(TIED)
    copies = [tied for tied in mesh[PP].all_gather_objects(mine) if tied is not None]
    assert len(copies) == 2
    assert torch.equal(copies[0], copies[1])
