"""The marks `ranks` and `devices`: options, checks and defaults."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

DEFAULT_AXIS = "data"
"""Axis of a mesh without names."""
AXIS_TYPES = ("auto", "explicit", "manual")
MARKS = {
    "ranks": "ranks(count, *, mesh=None, timeout=None, backend=None): run this test on gloo ranks.",
    "devices": "devices(count, *, mesh=None, timeout=None, axis_types='auto'): run this test in a process "
    "with this number of JAX devices.",
}
OPTIONS = {"ranks": {"mesh", "timeout", "backend"}, "devices": {"mesh", "timeout", "axis_types"}}


class Asked(NamedTuple):
    """The contents of a mark, with its defaults."""

    kind: str
    """The mark: ranks or devices."""
    count: int
    mesh: dict[str, int]
    timeout_s: float | None = None
    backend: str = ""
    axis_types: tuple[str, ...] = ()


def asked_by(item: pytest.Item) -> Asked | None:
    """The contents of the closest mark of a test; None for no mark. Raises ValueError: it is wrong."""
    marks = [mark for kind in MARKS if (mark := item.get_closest_marker(kind))]
    if not marks:
        return None
    if len(marks) > 1:
        raise ValueError("a test runs on ranks or on devices: remove one of the two marks")
    return read(marks[0])


def read(mark: pytest.Mark) -> Asked:
    """The contents of a mark. Raises ValueError with one line that names the mistake."""
    kind, options = mark.name, dict(mark.kwargs)
    if "count" in options and not mark.args:
        counts: tuple[Any, ...] = (options.pop("count"),)
    else:
        counts = mark.args
    if len(counts) != 1 or not _is_count(counts[0]):
        given = ", ".join(map(repr, counts))
        raise ValueError(f"@pytest.mark.{kind}({given}): give the number of {kind}, 1 or more")
    if unknown := sorted(options.keys() - OPTIONS[kind]):
        known = ", ".join(sorted(OPTIONS[kind]))
        raise ValueError(f"@pytest.mark.{kind}: unknown option {unknown[0]}: choose from {known}")
    count, timeout = counts[0], options.get("timeout")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(f"@pytest.mark.{kind}: timeout = {timeout!r}: give seconds, more than 0")
    mesh = _mesh(kind, count, options.get("mesh"))
    return Asked(
        kind=kind,
        count=count,
        mesh=mesh,
        timeout_s=timeout,
        backend=options.get("backend") or "",
        axis_types=_axis_types(mesh, options.get("axis_types", "auto")) if kind == "devices" else (),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _mesh(kind: str, count: int, mesh: Mapping[str, int] | None) -> dict[str, int]:
    """Sizes by axis. Raises ValueError: their product is not the count."""
    if mesh is None:
        return {DEFAULT_AXIS: count}
    if not isinstance(mesh, Mapping) or not mesh or not all(map(_is_count, mesh.values())):
        raise ValueError(
            f'@pytest.mark.{kind}: mesh = {mesh!r}: give sizes by axis, such as {{"data": {count}}}'
        )
    if (product := math.prod(mesh.values())) != count:
        sizes = " x ".join(map(str, mesh.values()))
        raise ValueError(
            f"@pytest.mark.{kind}({count}): the mesh {dict(mesh)} has {sizes} = {product} {kind}: "
            f"change the mesh, or write {kind}({product})"
        )
    return dict(mesh)


def _axis_types(mesh: Mapping[str, int], types: str | Mapping[str, str]) -> tuple[str, ...]:
    """The type of each axis. Raises ValueError: an unknown axis or type."""
    by_axis = (
        dict.fromkeys(mesh, types)
        if isinstance(types, str)
        else {axis: "auto" for axis in mesh} | dict(types)
    )
    if unknown := [axis for axis in by_axis if axis not in mesh]:
        raise ValueError(f"axis_types: the mesh has no axis {unknown[0]!r}: it has {', '.join(mesh)}")
    if wrong := [kind for kind in by_axis.values() if kind not in AXIS_TYPES]:
        raise ValueError(f"axis_types: {wrong[0]!r}: choose from {', '.join(AXIS_TYPES)}")
    return tuple(by_axis.values())
