"""TensorBoard's event files: what is drawn of a step, and nothing where nobody asks for them."""

import importlib.util

import pytest

from compare.contract.record import Step
from compare.execute import tensorboard
from compare.execute.tensorboard import events, require_tensorboard, scalars
from compare.host.facts import MissingPackageError
from compare.spec.experiment import Experiment, ExperimentError, Model, Train

SPEC = Experiment(model=Model(block_size=32), train=Train(batch_size=8, gradient_accumulation_steps=2))
STEP = Step(step=3, loss=2.5, grad_norm=1.5, lr=1e-3, step_time_ms=500.0)


def test_without_a_folder_nothing_is_written_or_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    require_tensorboard("")
    with pytest.raises(MissingPackageError, match=r"pip install 'shardpair\[tensorboard\]'"):
        require_tensorboard("events")
    with events("", "jax-manual") as draw:
        draw({"train/loss": 1.0}, 3)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for place in ("file", "file/inside"):
        with pytest.raises(ExperimentError, match=f"--tensorboard {place} cannot be written"):
            require_tensorboard(place)


@pytest.mark.skipif(not importlib.util.find_spec("tensorboardX"), reason="tensorboardX is not installed")
def test_every_engine_has_a_folder_of_its_own(tmp_path):
    values = scalars(STEP, SPEC)
    assert (values["train/loss"], values["speed/samples_per_s"]) == (2.5, 32)
    assert values["speed/tokens_per_s"] == 32 * 32
    assert "train/loss_scale" not in values
    for name in ("jax-manual", "torch-manual"):
        with events(str(tmp_path), name) as draw:
            draw(values, STEP.step)
        (path,) = (tmp_path / name).iterdir()
        assert path.name.startswith("events.out.tfevents")
        assert all(tag.encode() in path.read_bytes() for tag in values)
