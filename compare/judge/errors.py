"""The error of a tensor, and the part of a weight that is compared."""

import math

import numpy as np

from compare.spec.experiment import Model

KEY = 1
"""Index of the key among query, key and value."""
Found = tuple[float, str]
"""A relative error and its place; where the error is infinite, a description of the fault."""


def relative_error(
    value: np.ndarray, reference: np.ndarray, begin: np.ndarray | None = None, *, least: float = 0.0
) -> float:
    """max|value - reference| / max|reference|; absolute if the reference is zero.

    Entries are not divided one by one: in exact arithmetic some gradients are zero. The divisor is `least` at
    least: the whole gradient of a parameter may be zero, and rounding then makes a tiny one.

    With `begin`, the tensor before training, the error is rms(value - reference) / rms(reference - begin): 1
    for a tensor that did not move. It is relative to rms(reference) if the reference did not move. Infinite
    if shapes differ or a value is not finite.
    """
    if len({array.shape for array in (value, reference, begin) if array is not None}) > 1:
        return math.inf
    value, reference = value.astype(np.float64), reference.astype(np.float64)
    if begin is None:
        off, scale = largest(value - reference), max(largest(reference), least)
    else:
        off, scale = _rms(value - reference), _rms(reference - begin) or _rms(reference)
    error = off / (scale or 1.0)
    return error if math.isfinite(error) else math.inf


def largest(array: np.ndarray) -> float:
    """The largest absolute value of an array; 0 if it is empty."""
    return float(np.abs(array).max(initial=0.0))


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0


def without_key_bias(name: str, tensor: np.ndarray, model: Model) -> np.ndarray:
    """A weight without the key part of a query-key-value bias (3, H, D), or (K, G + 2, D).

    A key bias adds one number to all logits of a query, which softmax ignores. In exact arithmetic its
    gradient is zero. Rounding leaves a gradient as large as Adam's epsilon, which Adam turns into a full
    update. RoPE rotates the bias, so there it is compared.
    """
    if not name.endswith(".attention.qkv.bias") or model.position == "rope":
        return tensor
    return np.delete(tensor, KEY, axis=0) if model.group == 1 else np.delete(tensor, model.group, axis=1)
