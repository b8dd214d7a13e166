"""The first place where two traces differ (`compare.contract.trace`), from the arrays of two runs.

Outputs are compared in the order of computation. If all agree, gradients are compared in the opposite order.
A mistake changes all places behind it. So it is in the step that leads to the first place that differs.
Method: TTrace (arXiv 2506.09280).

An error is the largest difference of a tensor, divided by its largest entry. The limit and the least divisor
are as for gradients of weights.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from compare.contract.trace import COPY, LOSS, Place, places, split_dims
from compare.judge.errors import largest, relative_error
from compare.judge.rungs import NAMED
from compare.spec.axes import PP, TP
from compare.spec.experiment import Experiment, Layout

Trace = tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]
"""Outputs and gradients by place."""
FORWARD, BACKWARD = "forward", "backward"
GRADIENTS = NAMED["gradients"]
RANGES = 3
"""Ranges of indices that a sentence has; more are counted."""
WORDS = {
    "pass": ("pass", "passes"),
    "row": ("row", "rows"),
    "position": ("position", "positions"),
    "heads": ("head", "heads"),
    "head_dim": ("feature of a head", "features of a head"),
    "mlp": ("feature", "features"),
    "embed": ("feature", "features"),
    "choice": ("expert", "experts"),
}
"""Singular and plural of what the indices of a dim number."""
QUERIES_KEYS_VALUES = ("queries", "keys", "values")


class Difference(Struct, frozen=True, kw_only=True):
    """The first place where a trace differs from its reference; without a place, all places agree."""

    direction: str = ""
    """forward for an output, backward for a gradient; '' if all places agree."""
    place: str = ""
    error: float = 0.0
    """Relative error at the place, infinite if a value is not finite; if all places agree, the largest."""
    before: float | UnsetType = UNSET
    """Largest error of the places that were computed before; unset at the first place."""
    ratio: float | UnsetType = UNSET
    """The candidate over the reference, if it is the same for all wrong elements."""
    where: str = ""
    """Wrong indices and devices in words; '' if all indices are wrong on the only device."""
    devices: dict[str, list[int]] = {}
    """Wrong devices of each axis on which others are right."""
    without: str = ""
    """A setting of the run that its trace did not have."""

    def sentence(self) -> str:
        """The direction, the place, its error and its input's, the ratio, and the devices."""
        without = f" (traced without {self.without})" if self.without else ""
        if not self.place:
            worst = "exactly" if self.error == 0 else f"to {self.error:.0e}"
            own = "the mistake is in a weight's own gradient or later"
            return f"the trace agrees {worst} at all places: {own}{without}"
        numbers = [f"{self.error:.0e}" if math.isfinite(self.error) else "not finite"]
        if self.before is not UNSET:
            numbers.append(f"its input agrees {f'to {self.before:.0e}' if self.before else 'exactly'}")
        ratio = "" if self.ratio is UNSET else f": {_ratio_in_words(self.ratio)}"
        where = self.where and f" {self.where}"
        return f"{self.direction} first differs at {self.place} ({'; '.join(numbers)}){ratio}{where}{without}"


def first_difference(reference: Trace, candidate: Trace, experiment: Experiment, *, dtype: str) -> Difference:
    """Compare two traces. The experiment is the candidate's; the coarser dtype of both gives the limit.

    Places whose reference is not finite are skipped.
    """
    limit, listed, worst = getattr(GRADIENTS.limits, dtype), places(experiment), 0.0
    ways = (FORWARD, listed), (BACKWARD, listed[::-1])
    for (direction, ordered), expected_of, values_of in zip(ways, reference, candidate, strict=True):
        sizes = (largest(expected_of[place.name]) for place in listed if place.name != LOSS)
        least, before = GRADIENTS.least * max(filter(math.isfinite, sizes), default=0.0), UNSET
        for place in ordered:
            expected = expected_of[place.name].astype(np.float64)
            if not np.isfinite(expected).all():
                continue
            copies = copies_of(values_of, place, experiment.layout.tp)
            scale = max(largest(expected), 0.0 if place.name == LOSS else least)
            errors = [relative_error(value, expected, least=scale) for value in copies]
            if (error := max(errors)) <= limit:
                before, worst = max(before or 0.0, error), max(worst, error)
                continue
            value = copies[errors.index(error)].astype(np.float64)
            wrong = ~(np.abs(value - expected) <= limit * scale)
            of_tp = [device for device, found in enumerate(errors) if found > limit and len(errors) > 1]
            where, devices = describe(wrong, place, experiment.layout, of_tp)
            ratio = constant_ratio(value[wrong], expected[wrong], tolerance=100 * limit * scale)
            return Difference(
                direction=direction,
                place=place.name,
                error=error,
                before=before,
                ratio=ratio,
                where=where,
                devices=devices,
            )
    return Difference(error=worst)


def copies_of(values: Mapping[str, np.ndarray], place: Place, tp: int) -> list[np.ndarray]:
    """The tensor of a place; if copies differ, one tensor for each device of tp."""
    first = values[place.name]
    names = [f"{place.name}{COPY}{device}" for device in range(1, tp)]
    return [first, *(values.get(name, first) for name in names if any(name in values for name in names))]


def constant_ratio(values: np.ndarray, expected: np.ndarray, *, tolerance: float) -> float | UnsetType:
    """values / expected, if it is one number for several elements and explains nine tenths of the error."""
    square = float(expected @ expected)
    if len(values) < 2 or not square or not np.isfinite(values).all():
        return UNSET
    ratio = float(values @ expected) / square
    rest = largest(values - ratio * expected) / max(abs(ratio), 1.0)
    return ratio if rest <= min(tolerance, 0.1 * largest(values - expected)) else UNSET


def describe(
    wrong: np.ndarray, place: Place, layout: Layout, of_tp: Sequence[int] = ()
) -> tuple[str, dict[str, list[int]]]:
    """Wrong indices and devices in words, and the devices of each axis on which others are right.

    Args:
        wrong: a mask of the whole tensor.
        of_tp: wrong devices of tp, if its devices have different copies.
    """
    splits, phrases, devices = split_dims(place, layout), list[str](), dict[str, list[int]]()
    for dim, logical in enumerate(place.axes):
        indices = np.flatnonzero(np.moveaxis(wrong, dim, 0).reshape(wrong.shape[dim], -1).any(axis=1))
        if not (words := indices_in_words(indices, logical, wrong.shape[dim])):
            continue
        on, here = np.arange(wrong.shape[dim]), dict[str, list[int]]()
        for axis, (_, parts) in ((axis, how) for axis, how in splits.items() if how[0] == dim):
            some = [device for device, part in enumerate(parts) if np.isin(part, indices).any()]
            if len(some) < len(parts):
                here[axis] = some
                on = np.intersect1d(on, np.concatenate([parts[device] for device in some]))
        if here:  # the indices are all that these devices have, or some of them
            named = " and ".join(_devices(axis, some) for axis, some in here.items())
            words += f" {'=' if len(on) == len(indices) else 'on'} {named}"
        phrases.append(words)
        devices |= here
    at = [f"at {', '.join(phrases)}"] if phrases else []
    if of_tp and len(of_tp) < layout.tp:
        devices[TP] = list(of_tp)
        at.append(f"only on {_devices(TP, of_tp)}")
    if whole := [axis for axis, degree in layout.axes.items() if degree > 1 and axis not in (PP, *devices)]:
        at.append(f"on all devices of {' and '.join(whole)}")
    return ", ".join(at), devices


def indices_in_words(indices: np.ndarray, logical: str, size: int) -> str:
    """Some indices of a dim, such as `positions 4-7`; '' for all, and for scattered features of a token."""
    if len(indices) == size:
        return ""
    if logical == "qkv":
        return " and ".join(QUERIES_KEYS_VALUES[index] for index in indices)
    if logical == "group":
        kinds = dict.fromkeys(max(index - size + 3, 0) for index in indices)
        return " and ".join(QUERIES_KEYS_VALUES[kind] for kind in kinds) if len(kinds) < 3 else ""
    ranges = ranges_of(indices)
    if logical in ("embed", "head_dim") and (len(ranges) > 1 or len(indices) > size / 2):
        return ""
    singular, plural = WORDS[logical]
    if len(ranges) > RANGES:
        return f"{len(indices)} of {size} {plural}"
    return f"{singular if len(indices) == 1 else plural} {', '.join(ranges)}"


def ranges_of(indices: Iterable[int]) -> list[str]:
    """Neighbouring indices together: 0, 1, 2, 5 -> 0-2 and 5."""
    ranges: list[list[int]] = []
    for index in map(int, indices):
        if ranges and ranges[-1][-1] == index - 1:
            ranges[-1][-1:] = [index]
        else:
            ranges.append([index, index])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


def _devices(axis: str, devices: Sequence[int]) -> str:
    return f"device{'s' * (len(devices) > 1)} {', '.join(ranges_of(devices))} of {axis}"


def _ratio_in_words(ratio: float) -> str:
    if abs(ratio) < 1e-9:
        return "zero"
    text = f"{ratio:.2f}" if abs(ratio) >= 0.1 and abs(ratio - 1) >= 0.005 else f"{ratio:.8g}"
    return f"{text} times the reference"
