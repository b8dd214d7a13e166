"""Who holds what in torchpar: the description against what each rank really holds, bit for bit, on gloo."""

import math
from functools import partial

import numpy as np
import pytest
from assembly import assemble, cut
from layouts import TORCH_COMPILER, TORCH_LIBRARY, TORCH_SHARED, TORCH_ZERO
from ranks import CPU, on_ranks

from compare.numerics.boxes import Given, Weights
from compare.numerics.parameters import parameter_table
from compare.spec.experiment import Experiment, Layout, Model, Precision
from torchpar.comm.mesh import Mesh, make_mesh
from torchpar.optimizer import make_optimizer
from torchpar.parallel_model import ParallelModel
from torchpar.shards import empty_model, fill_with, held, shards
from torchpar.train import PARALLELIZE

# No degree divides the vocabulary, and four ranks divide few of the flat buffers.
MODEL = Model(n_layer=4, n_head=4, n_embd=12, block_size=7, vocab_size=51, bias=True)
ZERO = ("zero1", "zero2", "zero3", "hsdp")
CASES = {
    "torch-manual": {
        **TORCH_SHARED,
        **{name: TORCH_ZERO[name] for name in (*ZERO, "zero1_replicated")},
        "zero1_tp": Layout(dp_shard=2, zero=1, tp=2),
        "zero2_tp": Layout(dp_shard=2, zero=2, tp=2),
    },
    "torch-library": TORCH_SHARED | {name: TORCH_LIBRARY[name] for name in (*ZERO, "hybrid_zero1")},
    "torch-compiler": TORCH_COMPILER,
}


def random_weights() -> dict[str, np.ndarray]:
    """No two elements are equal, so that nothing may be elsewhere than it is said to be."""
    generator = np.random.default_rng(0)
    return {row.name: generator.standard_normal(row.shape) for row in parameter_table(MODEL)}


class Watched(Given):
    """Weights that count the elements that are read."""

    read = 0

    def boxes(self, name, boxes):
        self.read += sum(box.size for box in boxes)
        return super().boxes(name, boxes)


def make_parallel(
    engine: str, layout: Layout, rank: int, weights: Weights | None = None
) -> tuple[ParallelModel, Mesh]:
    """A model that is filled as it is cut."""
    experiment = Experiment(model=MODEL, precision=Precision(dtype="float64"))
    mesh = make_mesh(layout, rank=rank, device=CPU)
    parallel = PARALLELIZE[engine](
        empty_model(experiment),
        mesh=mesh,
        layout=layout,
        make_optimizer=partial(make_optimizer, experiment=experiment),
        fill=fill_with(weights or Given(random_weights()), experiment, mesh),
    )
    return parallel, mesh


@pytest.mark.parametrize("engine", CASES)
@on_ranks
def test_every_rank_holds_what_is_said(rank: int, engine: str) -> None:
    for name, layout in CASES[engine].items():
        holds_what_is_said(rank, engine, layout, name)


def holds_what_is_said(rank: int, engine: str, layout: Layout, name: str) -> None:
    whole = random_weights()
    given = Watched(whole)
    parallel, mesh = make_parallel(engine, layout, rank, given)
    mine = list(held(parallel.weights(), shards(parallel, MODEL, mesh)))
    assert given.read <= sum(math.prod(shard.shape) for shard, _ in mine)  # nothing of other parts and stages
    assert [shard for shard, _ in mine] == shards(parallel, MODEL, mesh)
    assert sum(array.size for _, array in mine) <= sum(p.numel() for p in parallel.parameters.values())
    for shard, array in mine:
        assert shard.device == rank
        np.testing.assert_array_equal(array, cut(whole[shard.name], shard), err_msg=f"{name} {shard}")
    everywhere = [part for parts in mesh.world.all_gather_objects(mine) for part in parts]
    for tensor_name, tensor in whole.items():
        parts = [(shard, array) for shard, array in everywhere if shard.name == tensor_name]
        once = [(shard, array) for shard, array in parts if not shard.replica]
        np.testing.assert_array_equal(assemble(tensor.shape, parts), tensor)
        np.testing.assert_array_equal(assemble(tensor.shape, once), tensor)
        assert sum(array.size for _, array in once) == tensor.size, f"{name} {tensor_name}"
