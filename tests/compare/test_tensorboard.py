"""TensorBoard's event files: what is drawn of a step, and nothing where nobody asks for them."""

import importlib.util

import pytest

from compare.contract.record import Step
from compare.execute import tensorboard
from compare.execute.tensorboard import events, in_turn, require_tensorboard, scalars
from compare.host.facts import MissingPackageError
from compare.numerics.evaluation import Evaluation
from compare.spec.experiment import Experiment, Model, Train

SPEC = Experiment(model=Model(block_size=32), train=Train(batch_size=8, gradient_accumulation_steps=2))
STEP = Step(step=3, loss=2.5, grad_norm=1.5, lr=1e-3, step_time_ms=500.0)
EVALUATION = Evaluation(step=4, train=2.0, validation=2.25)


def test_what_is_drawn_of_a_step():
    found = scalars(STEP, SPEC)
    assert found["train/loss"] == 2.5
    assert found["speed/samples_per_s"] == 32
    assert found["speed/tokens_per_s"] == 32 * 32
    assert "train/loss_scale" not in found


def test_without_a_folder_nothing_is_written_or_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    require_tensorboard("")
    with pytest.raises(MissingPackageError, match=r"pip install 'shardpair\[tensorboard\]'"):
        require_tensorboard("events")
    seen = []
    with events("", "jax-manual", SPEC) as file:
        in_turn(seen.append, file.step)(STEP)
        file.evaluations([EVALUATION])
    assert seen == [STEP]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not importlib.util.find_spec("tensorboardX"), reason="tensorboardX is not installed")
def test_every_engine_has_a_folder_of_its_own(tmp_path):
    for name in ("jax-manual", "torch-manual"):
        with events(str(tmp_path), name, SPEC) as file:
            file.step(STEP)
            file.evaluations([EVALUATION])
        (path,) = (tmp_path / name).iterdir()
        content = path.read_bytes()
        assert path.name.startswith("events.out.tfevents")
        for tag in (*scalars(STEP, SPEC), "evaluation/train", "evaluation/validation"):
            assert tag.encode() in content
