"""torchpar's state in checkpoints: under every layout each rank takes its part, and gives it back."""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from assembly import cut
from checkpoints import STEP, UPDATES, assert_is_random, describe, random_state, write_random
from gpt_steps import keep_values
from layouts import TORCH_COMPILER, TORCH_LIBRARY, TORCH_SHARED, TORCH_ZERO
from ranks import CPU, on_ranks

from compare.checkpoint.description import folder_name
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Saver
from compare.contract.request import Request
from compare.spec.experiment import Experiment, Layout, Model, Optimizer, Precision
from torchpar.comm.mesh import make_mesh
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.run import Run
from torchpar.shards import held, restore_moments, shards, state_parts
from torchpar.train import PARALLELIZE
from torchpar.weights import load_weights, moment_keys

# No degree divides the vocabulary, and four ranks divide few of the flat buffers.
MODEL = Model(n_layer=4, n_head=4, n_embd=12, block_size=6, vocab_size=51, bias=True)
CASES = {  # all placements are in test_torchpar_shards.py
    "torch-manual": (
        TORCH_ZERO["zero1_replicated"],
        TORCH_ZERO["hsdp"],
        Layout(dp_shard=2, zero=1, tp=2),
        TORCH_SHARED["fsdp_pp"],
        TORCH_SHARED["interleaved"],
    ),
    "torch-library": (TORCH_LIBRARY["zero1"], TORCH_LIBRARY["fsdp_tp"], TORCH_SHARED["tp_sp_pp"]),
    "torch-compiler": (TORCH_COMPILER["zero1"], TORCH_COMPILER["fsdp_tp_sp"]),
}


def spec(layout: Layout, optimizer: Optimizer) -> Experiment:
    return Experiment(model=MODEL, layout=layout, optimizer=optimizer, precision=Precision(dtype="float64"))


def restored(engine: str, experiment: Experiment, rank: int, checkpoint: Path) -> Run:
    """A run that goes on from it, as `train.set_up` and `train` make one."""
    model, mesh = GPT(MODEL).double(), make_mesh(experiment.layout, rank=rank, device=CPU)
    load_weights(model, CheckpointReader(checkpoint).group("weights"))
    maker = partial(make_optimizer, experiment=experiment)
    options = {"layout": experiment.layout, "make_optimizer": maker, "fill": keep_values}
    run = Run(
        request=Request(engine=engine, experiment=experiment),
        mesh=mesh,
        rank=None,
        corpus=None,
        parallel=PARALLELIZE[engine](model, mesh=mesh, **options),
        compute=None,
        update=None,
    )
    restore_moments(run, checkpoint)
    return run


def there_and_back(rank: int, engine: str, experiment: Experiment) -> None:
    """All ranks in one temporary folder, which the first one makes."""
    world = make_mesh(experiment.layout, rank=rank, device=CPU).world
    folder = Path(world.all_gather_objects(tempfile.mkdtemp() if rank == 0 else "")[0])
    if rank == 0:
        write_random(folder / "given", experiment)
    world.all_gather_objects(None)
    run = restored(engine, experiment, rank, folder / "given" / "checkpoints" / folder_name(STEP))
    assert (run.state.step, run.state.updates) == (STEP, UPDATES)
    whole = random_state(experiment)
    for group, key in moment_keys(experiment.optimizer).items():
        parts = shards(run.parallel, MODEL, run.mesh, of_moments=True)
        for shard, array in held(run.parallel.own_moments(key), parts):
            np.testing.assert_array_equal(array, cut(whole[group, shard.name], shard), err_msg=str(shard))
    saver = Saver(folder / "taken", [rank], of=experiment.layout.devices, keep=1)
    saver.save(describe(experiment), state_parts(run))
    saver.finish()
    world.all_gather_objects(None)  # the first completes it
    assert_is_random(folder / "taken" / folder_name(STEP), experiment)


@pytest.mark.parametrize("engine", CASES)
@on_ranks
def test_every_layout_takes_a_state_and_gives_it_back(rank: int, engine: str) -> None:
    for layout in CASES[engine]:
        there_and_back(rank, engine, spec(layout, Optimizer()))
    for optimizer in (Optimizer(name="sgd", momentum=0.9), Optimizer(name="sgd")):
        for layout in (TORCH_ZERO["zero1"], TORCH_ZERO["zero3"]):
            there_and_back(rank, engine, spec(layout, optimizer))
