"""torchpar.compiler's layouts on four gloo ranks, in float64: placements, against one device."""

from functools import partial

import gpt_steps
import pytest
from gpt_steps import ADAM, SGD, assert_same, reference
from layouts import TORCH_COMPILER as LAYOUTS
from ranks import on_ranks

from compare.spec.experiment import Experiment
from torchpar import compiler

train = partial(gpt_steps.train, compiler.parallelize)


@pytest.mark.parametrize(
    ("experiment", "names"),
    [(ADAM, list(LAYOUTS)), (SGD, ["zero1", "tp", "fsdp_tp_sp"])],
    ids=["adamw", "sgd"],
)
@on_ranks
def test_every_layout_equals_one_device(rank: int, experiment: Experiment, names: list[str]) -> None:
    expected = reference(experiment)
    for name in names:
        got, _ = train(LAYOUTS[name], rank, experiment)
        assert_same(got, expected, name)
