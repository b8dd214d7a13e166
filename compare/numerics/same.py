"""Equality of a sharded result and its reference, and the likely cause of a difference.

`torchpar.assert_same` and `jaxpar.assert_same` gather their tensors and call `assert_same` of this file. A
value is the same if |value - reference| <= atol + rtol |reference|.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

TOLERANCES = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}
"""rtol and atol by dtype, as in torch.testing.assert_close; other dtypes are exact."""
SHOWN = 8
"""Values of a message; it counts the others."""
LARGEST_RATIO = 64
Region = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value of a result, with its reference.

    Attributes:
        name: path in the result, such as layers.0.weight.
        actual, expected: whole arrays; bfloat16 is converted to float32.
        dtypes: names of both dtypes, before the conversion.
        regions: the part of the array on each rank or device, by name; {} if it is whole everywhere.
        copies: the array as each rank or device has it, where they should be equal and are not.
        axes: mesh axes of the value, with their sizes.
    """

    name: str
    actual: np.ndarray
    expected: np.ndarray
    dtypes: tuple[str, str]
    regions: Mapping[str, Region] = field(default_factory=dict)
    copies: Sequence[np.ndarray] = ()
    axes: Mapping[str, int] = field(default_factory=dict)

    def tolerances(self, rtol: float | None, atol: float | None) -> tuple[float, float]:
        """Relative and absolute tolerance: as given, or of the coarser dtype."""
        own = [TOLERANCES.get(dtype, (0.0, 0.0)) for dtype in self.dtypes]
        relative, absolute = (max(pair) for pair in zip(*own, strict=True))
        return relative if rtol is None else rtol, absolute if atol is None else atol


def assert_same(
    values: Sequence[Value], *, rtol: float | None, atol: float | None, problems: Sequence[str] = ()
) -> None:
    """Raise AssertionError if a value differs, with the place, the size and the likely cause of each.

    `problems` are differences of structure: missing values, or values of another type.
    """
    __tracebackhide__ = True
    lines = [*problems]
    for value in differing(values, rtol=rtol, atol=atol):
        lines.append(describe(value, *value.tolerances(rtol, atol)))
    if lines:
        more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        count = f"{len(lines)} of {max(len(values), len(lines))}"
        raise AssertionError("\n".join([f"{count} values differ from the reference", *lines[:SHOWN], *more]))


def differing(values: Sequence[Value], *, rtol: float | None, atol: float | None) -> list[Value]:
    """The values that differ from their reference."""
    return [value for value in values if value.copies or mismatch(value, *value.tolerances(rtol, atol)).any()]


def mismatch(value: Value, rtol: float, atol: float) -> np.ndarray:
    """True where a value differs; one True for another shape. NaN equals nothing."""
    if value.actual.shape != value.expected.shape:
        return np.array(True)
    return ~_close(value.actual, value.expected, rtol, atol)


def _close(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    if actual.dtype.kind in "biu" and expected.dtype.kind in "biu" and rtol == atol == 0:
        return actual == expected
    return np.isclose(actual, expected, rtol=rtol, atol=atol)


def describe(value: Value, rtol: float, atol: float) -> str:
    """The difference of a value in a few lines: its size, its place and its likely cause."""
    actual, expected = value.actual, value.expected
    title = f"{value.name or 'the value'} ({value.dtypes[0]}, {_shape(actual)})"
    if actual.shape != expected.shape:
        return f"{title}: the reference has {_shape(expected)}{_shard_of(actual, expected)}"
    wrong, indent = mismatch(value, rtol, atol), "\n    "
    if not wrong.any():
        return f"{title}: " + indent.join(causes(value, rtol, atol))
    with np.errstate(all="ignore"):
        error = np.where(wrong, np.abs(actual - expected) if actual.dtype.kind != "b" else wrong, 0)
    worst = np.unravel_index(int(np.argmax(np.nan_to_num(error, nan=np.inf, posinf=np.inf))), error.shape)
    place = f" at [{', '.join(map(str, worst))}]" if worst else ""
    size = f"{wrong.sum():,} of {wrong.size:,} numbers differ, most" if wrong.ndim else "it is"
    limits = f"rtol {rtol:g}, atol {atol:g}"
    first = f"{title}: {size}{place}: {actual[worst]:.6g} instead of {expected[worst]:.6g} ({limits})"
    return indent.join([first, *causes(value, rtol, atol), *places(wrong, value.regions)])


def causes(value: Value, rtol: float, atol: float) -> Iterator[str]:
    """Likely causes of a difference."""
    actual, expected = value.actual, value.expected
    yield from _of_copies(value, rtol, atol)
    if expected.dtype.kind not in "fc" or actual.shape != expected.shape:
        return
    if missing := int(np.isnan(actual).sum() - np.isnan(expected).sum()):
        yield f"{missing:,} of its numbers are NaN"
    elif not actual.any():
        yield "all its numbers are 0: is it never computed, or never received?"
    elif not value.copies and (ratio := _ratio(actual, expected, rtol, atol)) is not None:
        yield _cause_of(ratio, value.axes)
    elif _has_other_zeros(actual, expected, rtol, atol):
        yield "other numbers are 0: is it another dropout mask? Ranks that share a seed share a mask"
    elif (dim := _reordered(actual, expected, rtol, atol)) is not None:
        yield f"the reference in another order along dim {dim}: are shards or positions in the wrong order?"


def _of_copies(value: Value, rtol: float, atol: float) -> Iterator[str]:
    """The cause of copies that differ: their sum or mean may be the reference."""
    copies = [copy for copy in value.copies if copy.shape == value.expected.shape]
    if not value.copies or len(copies) < len(value.copies):
        return
    total = np.sum(copies, axis=0, dtype=np.result_type(value.expected, np.float64))
    yield f"its {len(copies)} copies on ranks or devices differ"
    rounding = len(copies) * max(rtol, atol)
    if _close(total, value.expected, rtol * 4, atol + rounding).all():
        yield "their sum is the reference: an all-reduce is missing (a partial sum was taken for the sum)"
    elif _close(total / len(copies), value.expected, rtol * 4, atol + rounding).all():
        yield "their mean is the reference: an all-reduce (mean) is missing"


def _ratio(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> float | None:
    """The constant ratio of a value to its reference; None if it is not constant."""
    large = np.abs(expected) > 1e-3 * np.abs(expected).max()
    if large.sum() < 2 or expected.dtype.kind == "c":
        return None
    with np.errstate(all="ignore"):
        ratio = float(np.median(actual[large] / expected[large]))
    if not ratio or not math.isfinite(ratio):
        return None
    limit = 10 * max(rtol, 1e-6)
    return ratio if np.isclose(actual, ratio * expected, rtol=limit, atol=abs(ratio) * atol).all() else None


def _cause_of(ratio: float, axes: Mapping[str, int]) -> str:
    """The likely cause of a constant ratio to the reference."""
    times, part = round(abs(ratio)), round(1 / abs(ratio))
    words = f"{ratio:.4g} times the reference"
    along = [f"{axis} has {size}" for axis, size in axes.items() if size in (times, part) and size > 1]
    where = f" (axis {', '.join(along)} devices)" if along else ""
    if math.isclose(ratio, times, rel_tol=1e-3) and 1 < times <= LARGEST_RATIO:
        return f"{words}{where}: is it reduced twice, or a sum where a mean is meant?"
    if math.isclose(ratio, 1 / part, rel_tol=1e-3) and 1 < part <= LARGEST_RATIO:
        return f"{words}, 1/{part}{where}: is a mean taken twice, or where a sum is meant?"
    return f"{words}: is a factor missing?"


def _has_other_zeros(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> bool:
    """True if the numbers are equal, except where one of the two is 0."""
    both = (actual != 0) & (expected != 0)
    return bool(both.any() and np.isclose(actual[both], expected[both], rtol=rtol, atol=atol).all())


def _reordered(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> int | None:
    """The dim along which a value is a permutation of its reference; None if there is none."""
    for dim, size in enumerate(actual.shape):
        if size < 2:
            continue
        rows, theirs = (np.moveaxis(array, dim, 0).reshape(size, -1) for array in (actual, expected))
        weights = np.cos(np.arange(rows.shape[1]))  # sums alone may be equal
        order, other = np.argsort(rows @ weights), np.argsort(theirs @ weights)
        if np.isclose(rows[order], theirs[other], rtol=rtol, atol=atol).all():
            return dim
    return None


def places(wrong: np.ndarray, regions: Mapping[str, Region]) -> Iterator[str]:
    """Where the differences are, if they are not everywhere: slices of dims, and ranks or devices."""
    parts = []
    for dim, size in enumerate(wrong.shape):
        along = np.flatnonzero(wrong.any(axis=tuple(d for d in range(wrong.ndim) if d != dim)))
        first, last = int(along[0]), int(along[-1]) + 1
        if last - first < size:
            parts.append(f"[{first}:{last}] of dim {dim}")
    if parts:
        yield f"only in {', '.join(parts)}"
    holders = [name for name, region in regions.items() if wrong[region].any()]
    if 0 < len(holders) < len(regions):
        yield f"only in the parts of {', '.join(holders)}"
    if _starts_right(wrong, regions):
        yield "the first shard is right, and no other: do they count positions from 0?"


def _starts_right(wrong: np.ndarray, regions: Mapping[str, Region]) -> bool:
    """True if all shards differ, except those at the beginning of a sharded dim."""
    starts = [tuple(part.indices(size)[0] for part, size in zip(region, wrong.shape, strict=True))
              for region in regions.values()]  # fmt: skip
    later = {any(start) for start in starts}
    return later == {True, False} and all(
        wrong[region].any() == any(start) for start, region in zip(starts, regions.values(), strict=True)
    )


def _shape(array: np.ndarray) -> str:
    return f"shape {tuple(map(int, array.shape))}"


def _shard_of(actual: np.ndarray, expected: np.ndarray) -> str:
    """A remark about a shape that is a part of the reference's, or the contrary."""
    if actual.ndim != expected.ndim:
        return ""
    dims = [dim for dim in range(actual.ndim) if actual.shape[dim] != expected.shape[dim]]
    if len(dims) == 1 and actual.shape[dims[0]]:
        times, rest = divmod(expected.shape[dims[0]], actual.shape[dims[0]])
        if times > 1 and not rest:
            return f": is it one of {times} shards of dim {dims[0]}? Gather it, or compare with its part"
    return ""
