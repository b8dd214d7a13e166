"""Errors of tensors: the largest one for each rung of the ladder, and where it is."""

import math
from collections.abc import Callable, Mapping

import numpy as np

KEY = 1  # its index among query, key, value

Found = tuple[float, str]
"""The worst relative error, and where it is; where the error is infinite, what is wrong."""


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    """max|value - reference| / max|reference|; absolute where the reference is all zero.

    Infinite for another shape, or where a value is not finite.
    """
    if value.shape != reference.shape:
        return math.inf
    difference = np.abs(value.astype(np.float64) - reference.astype(np.float64)).max(initial=0.0)
    scale = np.abs(reference.astype(np.float64)).max(initial=0.0)
    error = float(difference / scale) if scale else float(difference)
    return error if math.isfinite(error) else math.inf


def error_of_movement(value: np.ndarray, reference: np.ndarray, begin: np.ndarray) -> float:
    """rms(value - reference) / rms(reference - begin): 1 for a tensor that stayed where it began.

    Relative to rms(reference) where the reference did not move. Infinite for another shape, or where a value
    is not finite.
    """
    if not value.shape == reference.shape == begin.shape:
        return math.inf
    value, reference, begin = (array.astype(np.float64) for array in (value, reference, begin))
    scale = _rms(reference - begin) or _rms(reference) or 1.0
    error = _rms(value - reference) / scale
    return error if math.isfinite(error) else math.inf


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0


def worst_tensor(
    values: Mapping[str, np.ndarray],
    references: Mapping[str, np.ndarray],
    *,
    select: Callable[[str, np.ndarray], np.ndarray] = lambda name, tensor: tensor,
    since: Mapping[str, np.ndarray] | None = None,
) -> Found:
    """The largest error over tensors of the same names, and its name; or what is wrong.

    One tensor is in memory at a time, if they are read as they are asked for. `select` gives the part of one
    that counts. With `since`, what they were at first, errors are `error_of_movement`, else `relative_error`.
    """
    if values.keys() != references.keys():
        odd = min(values.keys() ^ references.keys())
        return math.inf, f"{odd} is in only one of the two"
    worst = (-1.0, "")
    for name in references:
        value, reference = select(name, values[name]), select(name, references[name])
        if since is None:
            error = relative_error(value, reference)
        else:
            error = error_of_movement(value, reference, select(name, since[name]))
        if not math.isfinite(error):
            if value.shape != reference.shape:
                return math.inf, f"{name} has shape {value.shape} instead of {reference.shape}"
            whose = "" if np.isfinite(reference).all() else "of the reference "
            return math.inf, f"{name} {whose}is not finite"
        worst = max(worst, (error, name), key=lambda found: found[0])
    return worst


def without_key_bias(name: str, tensor: np.ndarray) -> np.ndarray:
    """A weight, without the key third of a query-key-value bias (3, H, D).

    A key bias adds the same number to all logits of a query, and softmax does not see it: in exact
    arithmetic its gradient is zero, and it changes nothing. In less than float64, what rounding leaves of
    that gradient is as large as Adam's epsilon, and Adam makes it an update as large as any other.
    """
    return np.delete(tensor, KEY, axis=0) if name.endswith(".attention.qkv.bias") else tensor
