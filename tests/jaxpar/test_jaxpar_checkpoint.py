"""jaxpar's state in checkpoints: under every layout each device takes its part, and gives it back."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import STEP, UPDATES, assert_is_random, describe, random_state, write_random
from jax_steps import experiment_of
from layouts import JAX, JAX_COMPILER_PIPELINES, JAX_MANUAL_PIPELINES

from compare.checkpoint.description import WEIGHTS, folder_name
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Saver
from compare.numerics.shards import cut
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout, Model
from jaxpar.checkpoint import state_parts
from jaxpar.comm.mesh import make_mesh
from jaxpar.optimizer import moments
from jaxpar.remat import resolve_remat
from jaxpar.setup import prepare
from jaxpar.shards import held

# Four devices divide no width, vocabulary or number of positions: most shards are padded.
MODEL = Model(n_layer=4, n_head=2, n_embd=6, block_size=10, vocab_size=13, bias=True)
LAYOUTS = {
    "one": Layout(),
    "ddp": Layout(dp_replicate=4),
    **{n: JAX[n] for n in ("zero1", "zero3", "fsdp_tp_sp")},
}
ENGINE_NAMES = [name for name, engine in STUDIED.items() if engine.side == "jaxpar"]
CASES = {
    **{f"{engine} {name}": (engine, layout) for engine in ENGINE_NAMES for name, layout in LAYOUTS.items()},
    **{f"manual pp {name}": ("jax-manual", layout) for name, layout in JAX_MANUAL_PIPELINES.items()},
    **{f"compiler pp {name}": ("jax-compiler", layout) for name, layout in JAX_COMPILER_PIPELINES.items()},
}


@pytest.mark.parametrize(("engine", "layout"), CASES.values(), ids=CASES)
def test_every_layout_takes_a_state_and_gives_it_back(engine: str, layout: Layout, tmp_path: Path) -> None:
    experiment = experiment_of(layout, model=MODEL, batch_size=8)
    reader = CheckpointReader(write_random(tmp_path, experiment))
    mesh, remat = make_mesh(layout, platform="cpu"), resolve_remat(layout)
    sharded, state = prepare(engine, experiment, mesh=mesh, remat=remat, checkpoint=reader)
    assert (state.step, state.updates) == (STEP, UPDATES)
    whole = random_state(experiment)
    for group, tree in {WEIGHTS: state.params, **moments(state.opt_state)}.items():
        for shard, array in held(tree, sharded.placements, MODEL):
            np.testing.assert_array_equal(array, cut(whole[group, shard.name], shard), err_msg=str(shard))
    saver = Saver(tmp_path / "taken", range(layout.devices), of=layout.devices, keep=1)
    saver.save(describe(experiment), state_parts(sharded, state, MODEL))
    saver.finish()
    assert_is_random(tmp_path / "taken" / folder_name(STEP), experiment)
