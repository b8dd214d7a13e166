"""The shards of each rank against their description, bit for bit, on four gloo ranks.

Checkpoints: under every layout each rank reads its shards and writes them back.
"""

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from compare.checkpoint.description import WEIGHTS, folder_name
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Saver
from compare.contract.request import Request
from compare.numerics.boxes import Weights
from compare.side.recording import Progress
from compare.spec.experiment import Experiment, Layout, Model, Optimizer, Precision
from tests.support.assembly import assemble, cut
from tests.support.checkpoints import STEP, UPDATES, assert_is_random, describe, random_state, write_random
from tests.support.layouts import TORCH_COMPILER, TORCH_LIBRARY, TORCH_SHARED, TORCH_ZERO
from tests.support.ranks import CPU, on_ranks
from torchpar.checkpoint import (
    fill_with,
    local_moments,
    local_shards,
    restore_moments,
    shards_of,
    state_parts,
)
from torchpar.comm.mesh import Mesh, make_mesh
from torchpar.engine import Engine
from torchpar.run import Run
from torchpar.train import MAKE_ENGINE
from torchpar.weights import empty_model, moment_keys

# No degree divides the vocabulary, and four ranks divide few of the flat buffers.
MODEL = Model(n_layer=4, n_head=4, n_embd=12, block_size=7, vocab_size=51, bias=True)
ZERO = ("zero1", "zero2", "zero3", "hsdp")
CASES = {
    "torch-manual": {
        **TORCH_SHARED,
        **{name: TORCH_ZERO[name] for name in (*ZERO, "hybrid_zero1")},
        "zero1_tp": Layout(dp_shard=2, zero=1, tp=2),
        "zero2_tp": Layout(dp_shard=2, zero=2, tp=2),
    },
    "torch-library": TORCH_SHARED
    | {name: TORCH_LIBRARY[name] for name in (*ZERO, "hybrid_zero1", "fsdp_tp")},
    "torch-compiler": {
        name: one for name, one in TORCH_COMPILER.items() if one.cp == 1
    },  # cp shards no weight
}
SAVED = {
    "torch-manual": ("hybrid_zero1", "hsdp", "zero1_tp", "fsdp_pp", "interleaved"),
    "torch-library": ("zero1", "fsdp_tp", "tp_sp_pp"),
    "torch-compiler": ("zero1", "fsdp_tp_sp"),
}
"""Layouts whose state is saved and restored."""


def spec(layout: Layout, **sections) -> Experiment:
    return Experiment(layout=layout, precision=Precision(dtype="float64"), **{"model": MODEL} | sections)


class Watched(Weights):
    """Weights that count the elements that are read."""

    read = 0

    def boxes(self, name, boxes):
        self.read += sum(box.size for box in boxes)
        return super().boxes(name, boxes)


def make_parallel(engine: str, experiment: Experiment, rank: int, weights: Weights) -> tuple[Engine, Mesh]:
    """A model that is filled as it is sharded."""
    mesh = make_mesh(experiment.layout, rank=rank, device=CPU)
    fill = fill_with(weights, experiment, mesh)
    return MAKE_ENGINE[engine](empty_model(experiment, mesh.device), experiment, mesh, fill), mesh


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine in CASES for name in CASES[engine]])
@on_ranks
def test_shards_match_each_rank(rank: int, engine: str, name: str) -> None:
    experiment = spec(CASES[engine][name])
    whole = {name: array for (group, name), array in random_state(experiment).items() if group == WEIGHTS}
    given = Watched(whole, whole.__getitem__)
    parallel, mesh = make_parallel(engine, experiment, rank, given)
    mine = list(local_shards(parallel.weights(), shards_of(parallel, MODEL, mesh)))
    assert given.read <= sum(math.prod(shard.shape) for shard, _ in mine)  # no shards of other ranks
    assert [shard for shard, _ in mine] == shards_of(parallel, MODEL, mesh)
    assert sum(array.size for _, array in mine) <= sum(p.numel() for p in parallel.parameters.values())
    for shard, array in mine:
        assert shard.device == rank
        np.testing.assert_array_equal(array, cut(whole[shard.name], shard), err_msg=str(shard))
    everywhere = [part for parts in mesh.world.all_gather_objects(mine) for part in parts]
    for tensor_name, tensor in whole.items():
        parts = [(shard, array) for shard, array in everywhere if shard.name == tensor_name]
        once = [(shard, array) for shard, array in parts if not shard.replica]
        np.testing.assert_array_equal(assemble(tensor.shape, parts), tensor)
        np.testing.assert_array_equal(assemble(tensor.shape, once), tensor)
        assert sum(array.size for _, array in once) == tensor.size, tensor_name


def round_trip(rank: int, engine: str, experiment: Experiment) -> None:
    """Restore and save a state; all ranks share a temporary folder."""
    world = make_mesh(experiment.layout, rank=rank, device=CPU).world
    folder = Path(world.all_gather_objects(tempfile.mkdtemp() if rank == 0 else "")[0])
    if rank == 0:
        write_random(folder / "given", experiment)
    world.all_gather_objects(None)
    checkpoint = folder / "given" / "checkpoints" / folder_name(STEP)
    weights = CheckpointReader(checkpoint).group(WEIGHTS)
    parallel, mesh = make_parallel(engine, experiment, rank, weights)
    others = dict.fromkeys(("rank", "corpus", "train_step"))
    request = Request(engine=engine, experiment=experiment)
    run = Run(request=request, mesh=mesh, engine=parallel, state=Progress(), **others)
    restore_moments(run, checkpoint)
    assert (run.state.step, run.state.updates) == (STEP, UPDATES)
    whole = random_state(experiment)
    for group, key in moment_keys(experiment.optimizer).items():
        parts = shards_of(parallel, experiment.model, mesh, of_moments=True)
        for shard, array in local_shards(local_moments(parallel, key), parts):
            np.testing.assert_array_equal(array, cut(whole[group, shard.name], shard), err_msg=str(shard))
    saver = Saver(folder / "taken", [rank], of=experiment.layout.devices, keep=1)
    saver.save(describe(experiment), state_parts(run))
    saver.finish()
    world.all_gather_objects(None)  # rank 0 completes it
    assert_is_random(folder / "taken" / folder_name(STEP), experiment)


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine in SAVED for name in SAVED[engine]])
@on_ranks
def test_checkpoint_round_trip(rank: int, engine: str, name: str) -> None:
    even = replace(MODEL, block_size=6)  # which sequence parallelism divides
    round_trip(rank, engine, spec(CASES[engine][name], model=even))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("name", ["zero1", "zero3"])
@pytest.mark.parametrize("engine", SAVED)
@on_ranks
def test_checkpoint_of_sgd(rank: int, engine: str, name: str, momentum: float) -> None:
    round_trip(rank, engine, spec(TORCH_ZERO[name], optimizer=Optimizer(name="sgd", momentum=momentum)))
