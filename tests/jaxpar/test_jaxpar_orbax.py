"""orbax checkpoints: the state goes there and comes back bit for bit; others read it by its names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from compare.checkpoint.reader import CheckpointError, read_description
from compare.spec.experiment import Experiment, Model, Precision
from jaxpar import orbax_checkpoint as module
from jaxpar.orbax_checkpoint import DESCRIPTION, STATE, export_checkpoint, import_checkpoint
from tests.support.checkpoints import UPDATES, assert_is_random, random_state, write_random

EXPERIMENT = Experiment(
    model=Model(n_layer=2, n_head=2, n_embd=6, block_size=5, vocab_size=7, bias=True),
    precision=Precision(dtype="float64"),
)


def test_state_converts_to_orbax_and_back(tmp_path: Path, monkeypatch):
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

    # orbax does not detect one flipped bit.
    monkeypatch.setattr(module, "from_canonical", with_a_bit_flipped(module.from_canonical))
    export_checkpoint(given, tmp_path / "flipped")
    with pytest.raises(CheckpointError, match=r"flipped: m has changed since it was written \(sha256\)"):
        import_checkpoint(tmp_path / "flipped", tmp_path / "not-back")
    assert not (tmp_path / "not-back").exists()


def test_flipped_bit_of_description_has_no_effect(tmp_path: Path):
    """A flipped bit is rejected, or it changes nothing, such as white space."""
    given = write_random(tmp_path, EXPERIMENT)
    export_checkpoint(given, tmp_path / "orbax")
    path = tmp_path / "orbax" / DESCRIPTION / "metadata"
    content, rejected = path.read_bytes(), 0
    number = content.index(b'"learning_rate": 0.001') + len(b'"learning_rate": 0.00')
    for bit in (8 * number, *range(0, 8 * len(content), len(content))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            import_checkpoint(tmp_path / "orbax", tmp_path / f"{bit}")
        except CheckpointError:
            rejected += 1
        else:
            assert_is_random(tmp_path / f"{bit}", EXPERIMENT)
            assert read_description(tmp_path / f"{bit}").experiment == EXPERIMENT
    assert rejected > 5


def with_a_bit_flipped(convert: Callable) -> Callable:
    """`convert` with one wrong bit in its second tree, m."""
    calls = []

    def converted(arrays: dict[str, np.ndarray], model: Model) -> Any:
        calls.append(arrays)
        if len(calls) == 2:
            wrong = arrays["norm.scale"].copy()
            wrong.view(np.uint8)[0] ^= 1
            arrays = arrays | {"norm.scale": wrong}
        return convert(arrays, model)

    return converted


def test_invalid_checkpoint_is_rejected(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not an orbax checkpoint of shardpair"):
        import_checkpoint(tmp_path / "empty", tmp_path / "back")
    (tmp_path / "empty" / DESCRIPTION).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read by orbax") as refused:
        import_checkpoint(tmp_path / "empty", tmp_path / "back")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "back").exists()
