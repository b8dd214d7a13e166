"""orbax checkpoints: the state goes there and comes back bit for bit; others read it by its names."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import UPDATES, assert_is_random, random_state, write_random

from compare.checkpoint.reader import CheckpointError
from compare.spec.experiment import Experiment, Model, Precision
from jaxpar.orbax_checkpoint import STATE, export_checkpoint, import_checkpoint

EXPERIMENT = Experiment(
    model=Model(n_layer=2, n_head=2, n_embd=6, block_size=5, vocab_size=7, bias=True),
    precision=Precision(dtype="float64"),
)


def test_the_state_goes_there_and_back(tmp_path: Path):
    given = write_random(tmp_path, EXPERIMENT)
    export_checkpoint(given, tmp_path / "orbax")
    restored = ocp.Checkpointer(ocp.CompositeCheckpointHandler()).restore(
        (tmp_path / "orbax").absolute(), ocp.args.Composite(**{STATE: ocp.args.StandardRestore()})
    )[STATE]
    up = np.stack([random_state(EXPERIMENT)["weights", f"blocks.{i}.mlp.up.weight"] for i in range(2)])
    np.testing.assert_array_equal(restored["params"]["blocks"]["mlp"]["up"]["weight"], up)
    assert int(restored["step"]) == UPDATES
    import_checkpoint(tmp_path / "orbax", tmp_path / "back")
    assert_is_random(tmp_path / "back", EXPERIMENT)


def test_what_is_none_is_refused_in_one_line(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read by orbax") as refused:
        import_checkpoint(tmp_path / "empty", tmp_path / "back")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "back").exists()
