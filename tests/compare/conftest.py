"""What the tests of the harness share."""

import pytest

from compare.contract.experiment import Experiment, edited

FOUR = {"model": {"n_layer": 2, "n_head": 4}, "train": {"batch_size": 8, "max_iters": 3}}


@pytest.fixture
def small(tiny: Experiment) -> Experiment:
    """An experiment that four devices can share in every way."""
    return edited(tiny, FOUR)
