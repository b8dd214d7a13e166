"""The norm of gradients: PyTorch's own is off by 7e-5 where a float32 tensor is large."""

import numpy as np
import pytest
import torch

from torchpar.optimizer import ROW, norm_of_all

LARGE = 3_500_000


@pytest.mark.parametrize("sizes", [(LARGE,), (LARGE, 7, ROW, ROW + 1), (0, 5), (1,)])
def test_it_is_as_accurate_as_float32_allows(sizes):
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(size, np.float32) for size in sizes]
    exact = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays))
    tensors = [torch.from_numpy(array) for array in arrays]
    assert abs(norm_of_all(tensors).item() / exact - 1) < 5e-7


def test_it_is_not_finite_where_a_gradient_is_not():
    for bad in (float("inf"), float("nan")):
        spoiled = torch.ones(ROW + 3)
        spoiled[-1] = bad
        assert not norm_of_all([torch.ones(2), spoiled]).isfinite()
