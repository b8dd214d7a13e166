"""Evaluation: on every engine and layout the losses of one device, and the best checkpoint stays."""

import math

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from compare.checkpoint.description import checkpoints_in, folder_name
from compare.checkpoint.reader import read_description
from compare.checkpoint.saver import Saver, best_checkpoint
from compare.contract.record import read_record
from compare.numerics.data import SPLITS, open_corpus
from compare.numerics.shards import Shard
from compare.numerics.stream import AHEAD, evaluate, is_due, steps_due
from compare.spec.experiment import Data, Experiment, edited
from tests.support.bounds import assert_bounded
from tests.support.checkpoints import describe, random_state
from tests.support.grid import DEVICES, SETTINGS, SOME, arguments_of


def test_evaluation_batches_are_others(tiny):
    corpus = open_corpus(tiny)
    drawn = [corpus.evaluation_batch(tiny, split, 4, index) for split in SPLITS for index in (0, 1)]
    drawn += [corpus.batch(tiny, 4), corpus.evaluation_batch(tiny, "train", 5, 0)]
    texts = {inputs.tobytes() for inputs, _ in drawn}
    assert len(texts) == len(drawn)
    inputs, targets = corpus.evaluation_batch(tiny, "validation", 4, 0)
    assert inputs.shape == (1, 4, 16)
    np.testing.assert_array_equal(inputs[..., 1:], targets[..., :-1])
    assert inputs.tobytes() == drawn[2][0].tobytes()  # a function of its arguments
    text = corpus.validation.tobytes()
    assert inputs[0, 0].astype(corpus.validation.dtype).tobytes() in text


def test_evaluation_when_and_how_often(tiny):
    spec = edited(tiny, {"train": {"eval_interval": 4, "eval_iters": 3, "max_iters": 10}})
    assert steps_due(spec) == [0, 4, 8, 10]
    assert steps_due(spec, 5) == [8, 10]
    assert not is_due(tiny, 0)
    twice = edited(spec, {"train": {"gradient_accumulation_steps": 2}})
    seen = []
    found = evaluate(
        twice, open_corpus(twice), 4, lambda inputs, _: seen.append(inputs) or np.float32(len(seen))
    )
    assert len(seen) == 4  # three of each split, rounded up to passes of two
    assert (found.train, found.validation) == (1.5, 3.5)


def test_few_losses_are_under_way(tiny):
    """A hundred programs that send are more than XLA's CPU client takes: some runs aborted."""

    class Loss:
        def __init__(self):
            under_way.append(self)
            most.append(len(under_way))

        def __float__(self):
            assert self is under_way.pop(0)
            return 1.0

    under_way, most = [], []
    spec = edited(tiny, {"train": {"eval_interval": 4, "eval_iters": 3 * AHEAD}})
    assert evaluate(spec, open_corpus(spec), 4, lambda *_: Loss()).train == 1.0
    assert max(most) == AHEAD + 1
    assert not under_way


@pytest.mark.parametrize("row", [*DEVICES, *SOME])
def test_engines_evaluate_as_one_device(grid, row):
    """With dropout, which an evaluation is without. The run itself compares engines at every rung."""
    first, records = grid.reference(row), grid.records(row)
    assert len(records) > 1
    assert [one.step for one in first.evaluations] == [0, 2, 3]
    expected = [(one.train, one.validation) for one in first.evaluations]
    for record in records.values():
        losses = [(one.train, one.validation) for one in record.evaluations]
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
    # The watched step comes after an evaluation, and sends what any other does: `strategy` is a rung.
    assert abs(expected[0][1] - math.log(256)) < 0.3  # untrained weights, with a large train.init_std


@pytest.mark.parametrize("row", [*DEVICES, *SOME])
def test_peak_is_below_the_estimate(grid, row):
    for engine, record in grid.records(row).items():
        if (engine, row) != ("torch-manual", "tp_sp"):  # whose loss keeps a fourth copy of its logits
            assert_bounded(record)


def test_evaluation_changes_no_training(grid, shardpair):
    pair = ("torch-manual", "jax-compiler")
    done = shardpair(*arguments_of("ddp"), "--engines", *pair, *SETTINGS, "--run_dir", "without")
    assert "compute the same (loss, gradients, weights, optimizer: 14 checks)" in done.stdout
    assert "validation" not in done.stdout
    for engine in pair:
        without, record = read_record(shardpair.folder / "without" / engine), grid.records("ddp")[engine]
        assert [step.loss for step in without.steps] == [step.loss for step in record.steps]


def test_the_best_checkpoint_stays(tmp_path):
    spec = Experiment(data=Data(source="synthetic"))
    spec = edited(spec, {"model": {"n_layer": 1, "n_head": 1, "n_embd": 2, "block_size": 2, "vocab_size": 3}})
    saver = Saver(tmp_path, [0], of=1, keep=2)
    for step, loss in ((0, math.nan), (1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)):
        loss = UNSET if loss is None else loss
        described = replace(describe(spec), step=step, updates=step, validation_loss=loss)
        parts = [
            (group, Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape), array)
            for (group, name), array in random_state(spec).items()
        ]
        saver.save(described, parts)
    saver.finish()
    assert list(checkpoints_in(tmp_path)) == [2, 4, 5]
    best = best_checkpoint(tmp_path)
    assert best == tmp_path / folder_name(2)
    assert read_description(best).validation_loss == 1.0
