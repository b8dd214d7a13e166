"""Errors of tensors: the largest one for each rung of the ladder, and where it is."""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from compare.spec.experiment import Model

KEY = 1  # its index among query, key, value

Found = tuple[float, str]
"""The worst relative error, and where it is; where the error is infinite, what is wrong."""


def worst_of(found: Iterable[Found]) -> Found | None:
    """The first with the largest error; None of none."""
    return max(found, key=lambda one: one[0], default=None)


def relative_error(value: np.ndarray, reference: np.ndarray, begin: np.ndarray | None = None) -> float:
    """max|value - reference| / max|reference|; absolute where the reference is all zero.

    With `begin`, what both were at first, rms(value - reference) / rms(reference - begin): 1 for a tensor
    that stayed there; relative to rms(reference) where that did not move. Infinite for another shape, or
    where a value is not finite.
    """
    if len({array.shape for array in (value, reference, begin) if array is not None}) > 1:
        return math.inf
    value, reference = value.astype(np.float64), reference.astype(np.float64)
    if begin is None:
        off, scale = (float(np.abs(array).max(initial=0.0)) for array in (value - reference, reference))
    else:
        off, scale = _rms(value - reference), _rms(reference - begin) or _rms(reference)
    error = off / (scale or 1.0)
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
    that counts, and `since` has what they were at first.
    """
    if values.keys() != references.keys():
        odd = min(values.keys() ^ references.keys())
        return math.inf, f"{odd} is in only one of the two"
    found = list[Found]()
    for name in references:
        value, reference = select(name, values[name]), select(name, references[name])
        error = relative_error(value, reference, None if since is None else select(name, since[name]))
        if not math.isfinite(error):
            if value.shape != reference.shape:
                return math.inf, f"{name} has shape {value.shape} instead of {reference.shape}"
            whose = "" if np.isfinite(reference).all() else "of the reference "
            return math.inf, f"{name} {whose}is not finite"
        found.append((error, name))
    return worst_of(found) or (-1.0, "")


def without_key_bias(name: str, tensor: np.ndarray, model: Model) -> np.ndarray:
    """A weight, without the keys of a query-key-value bias (3, H, D), or (K, G + 2, D).

    A key bias adds the same number to all logits of a query, and softmax does not see it: in exact
    arithmetic its gradient is zero, and it changes nothing. In less than float64, what rounding leaves of
    that gradient is as large as Adam's epsilon, and Adam makes it an update as large as any other. But rope
    turns it: then it counts.
    """
    if not name.endswith(".attention.qkv.bias") or model.position == "rope":
        return tensor
    return np.delete(tensor, KEY, axis=0) if model.group == 1 else np.delete(tensor, model.group, axis=1)
