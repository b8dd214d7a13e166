"""Experiments that nobody chose, through the command: whatever is legal trains, and engines agree on it."""

from itertools import islice

import pytest
from random_experiments import (
    accepting,
    arguments_of,
    experiment_of,
    experiments,
    what_went_wrong,
)

from compare.spec.axes import AXES
from compare.spec.experiment import Experiment, revalidate


def is_small(experiment: Experiment) -> bool:
    """Whether it takes some ten seconds, and agrees to 1e-10 on any machine."""
    return (
        experiment.layout.devices == 2
        and experiment.model.n_layer <= 2
        and experiment.train.eval_interval == 0
        and experiment.precision.dtype == "float64"
    )


@pytest.mark.parametrize("place", range(2))
def test_engines_agree_on_what_nobody_chose(shardpair, place):
    """On the first small ones of the fixed seed."""
    drawn = next(islice((one for one in experiments() if is_small(one.experiment)), place, None))
    done = shardpair(*arguments_of(drawn, shardpair.folder))
    assert what_went_wrong(done) == "", drawn


def test_a_number_always_is_the_same_experiment():
    first = list(islice(experiments(7), 5))
    assert first == list(islice(experiments(7), 5))
    assert first[3] == experiment_of(7, 3)
    assert first != list(islice(experiments(8), 5))


def test_every_experiment_is_legal_and_all_kinds_come():
    drawn = list(islice(experiments(1), 250))
    for one in drawn:
        assert revalidate(one.experiment) == one.experiment
        assert len(one.engines) > 1
        assert one.engines == accepting(one.experiment)
    layouts = [one.experiment.layout for one in drawn]
    for axis in AXES:
        assert any(layout.axes[axis] > 1 for layout in layouts), axis
    assert {layout.devices for layout in layouts} == {1, 2, 3, 4, 6, 8}
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    piped = {layout.schedule for layout in layouts if layout.pp > 1}
    assert piped == {"gpipe", "1f1b", "interleaved", "zero_bubble"}
    assert {one.experiment.precision.dtype for one in drawn} == {"float64", "float32", "bfloat16", "float16"}
    for section, field in (
        ("model", "dropout"),
        ("model", "bias"),
        ("train", "eval_interval"),
        ("layout", "sequence_parallel"),
    ):
        assert any(getattr(getattr(one.experiment, section), field) for one in drawn), field
