"""Fused attention against float64: the reference, which kernels are tried, and that a mistake shows."""

import gpu_attention
import numpy as np
import pytest
from gpu_attention import LIMITS, NAMES, errors, kernels, reference, rounded


def test_the_references_gradients_are_those_of_differences():
    random = np.random.default_rng(1)
    q, k, v, dy = (random.standard_normal((1, 5, 2, 3)) for _ in range(4))
    y, *gradients = reference(q, k, v, dy)
    assert np.allclose(y[:, 0], v[:, 0])  # the first position sees itself alone
    step = 1e-6
    for place, gradient in enumerate(gradients):
        for index in ((0, 0, 0, 0), (0, 2, 1, 1), (0, 4, 1, 2)):
            moved = []
            for sign in (1, -1):
                inputs = [q.copy(), k.copy(), v.copy()]
                inputs[place][index] += sign * step
                moved.append((reference(*inputs, dy)[0] * dy).sum())
            assert gradient[index] == pytest.approx((moved[0] - moved[1]) / 2 / step, abs=1e-8)


def test_numbers_are_rounded_to_the_nearest_of_the_dtype():
    exact = np.array([1.0, 1.0 + 2**-9, 1.0 + 3 * 2**-9, -(1.0 + 2**-8)], "float32")
    assert rounded(exact, "bfloat16").tolist() == [1.0, 1.0, 1.0 + 2**-7, -1.0]  # ties go to even
    assert rounded(exact, "float16").tolist() == exact.tolist()
    assert rounded(exact, "float32").tolist() == exact.tolist()


def test_kernels_are_those_that_the_device_has():
    assert kernels("bfloat16", on_gpu=True)["jax"] == ["cudnn", "xla"]
    assert "FLASH_ATTENTION" in kernels("float16", on_gpu=True)["torch"]
    assert kernels("float32", on_gpu=True) == {"jax": ["xla"], "torch": ["EFFICIENT_ATTENTION", "MATH"]}
    assert kernels("float16", on_gpu=False)["jax"] == []


@pytest.mark.slow
def test_a_kernel_agrees_and_one_that_sees_the_future_does_not(monkeypatch):
    monkeypatch.setattr(gpu_attention, "SHAPE_BTHD", (1, 64, 2, 16))
    right = errors("bfloat16", {"torch": ["MATH"]})["torch MATH"]
    assert set(right) == set(NAMES)
    assert max(right.values()) < LIMITS["bfloat16"]
    wrong = errors("bfloat16", {"torch": ["MATH"]}, is_causal=False)["torch MATH"]
    assert min(wrong.values()) > 0.5
