"""Initial weights drawn box by box: the numbers of one draw of each whole tensor, as NumPy makes it."""

import hashlib

import numpy as np
import pytest

from compare.numerics import parameters
from compare.numerics.boxes import Box, full_box
from compare.numerics.parameters import SeedWeights, initial_parameters, parameter_table
from compare.spec.experiment import Experiment, Model, Precision, edited

EXPERIMENT = Experiment(model=Model(n_layer=2, n_head=2, n_embd=12, block_size=8, vocab_size=51, bias=True))


def drawn_at_once(experiment: Experiment, dtype: str) -> dict[str, np.ndarray]:
    """The seed's weights, by their definition."""
    found = {}
    for row in parameter_table(experiment.model):
        digest = hashlib.sha256(f"{experiment.train.seed} {row.name}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        constant = np.full(row.shape, row.init_constant)
        found[row.name] = (
            constant if row.init_std is None else generator.normal(0.0, row.init_std, row.shape)
        ).astype(dtype)
    return found


def test_init_std_scales_the_matrices():
    usual = initial_parameters(EXPERIMENT)
    wide = initial_parameters(edited(EXPERIMENT, {"train": {"init_std": 0.15}}))
    for name, tensor in usual.items():
        np.testing.assert_allclose(wide[name], tensor * (7.5 if tensor.ndim > 1 else 1), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("at_once", [1, 100, 2**18])
def test_every_box_has_the_numbers_of_the_whole(dtype, at_once, monkeypatch):
    monkeypatch.setattr(parameters, "DRAWN_AT_ONCE", at_once)
    experiment = Experiment(model=EXPERIMENT.model, precision=Precision(dtype=dtype))
    expected, weights = drawn_at_once(experiment, dtype), SeedWeights(experiment)
    assert list(weights) == list(expected)
    for name, tensor in expected.items():
        end = Box(tuple(size // 2 for size in tensor.shape), tuple(size - size // 2 for size in tensor.shape))
        begin = Box((0,) * tensor.ndim, tuple(-(-size // 3) for size in tensor.shape))
        boxes = [end, full_box(tensor.shape), begin, end]
        for box, found in zip(boxes, weights.boxes(name, boxes), strict=True):
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, tensor[box.slices], err_msg=f"{name} {box}")
    assert initial_parameters(experiment).keys() == expected.keys()
