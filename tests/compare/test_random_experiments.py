"""Experiments that nobody chose, through the command: whatever is legal trains, and engines agree on it."""

from itertools import islice

import pytest
from random_experiments import (
    arguments_of,
    experiments,
    what_went_wrong,
)

from compare.spec.experiment import Experiment


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
