"""Marks: what they ask for, and one line for each mistake."""

import pytest

from torchpar.plugin.marks import read


def mark(kind, *arguments, **options):
    return getattr(pytest.mark, kind)(*arguments, **options).mark


def test_marks_are_read():
    asked = read(mark("ranks", 4, mesh={"data": 2, "model": 2}, timeout=5, backend="nccl_like"))
    assert (asked.count, asked.mesh, asked.timeout_s) == (4, {"data": 2, "model": 2}, 5)
    assert (asked.kind, asked.backend, asked.axis_types) == ("ranks", "nccl_like", ())
    asked = read(mark("devices", count=2))
    assert (asked.mesh, asked.axis_types) == ({"data": 2}, ("auto",))
    asked = read(mark("devices", 6, mesh={"a": 2, "b": 3}, axis_types={"b": "explicit"}))
    assert asked.axis_types == ("auto", "explicit")


MISTAKES = [
    (mark("ranks"), "@pytest.mark.ranks(): give the number of ranks, 1 or more"),
    (mark("ranks", 0), "@pytest.mark.ranks(0): give the number of ranks"),
    (mark("ranks", True), "ranks(True): give"),
    (mark("devices", "4"), "devices('4'): give the number of devices"),
    (mark("ranks", 4, mesh={"a": 2, "b": 3}), "has 2 x 3 = 6 ranks: change the mesh, or write ranks(6)"),
    (mark("devices", 2, mesh=2), "mesh = 2: give sizes by axis"),
    (
        mark("ranks", 2, axis_types="auto"),
        "ranks: unknown option axis_types: choose from backend, mesh, timeout",
    ),
    (mark("ranks", 2, timeout=0), "timeout = 0: give seconds, more than 0"),
    (mark("devices", 2, axis_types="Auto"), "axis_types: 'Auto': choose from auto, explicit, manual"),
    (mark("devices", 2, axis_types={"tp": "auto"}), "the mesh has no axis 'tp': it has data"),
]


@pytest.mark.parametrize(("given", "words"), MISTAKES, ids=[words[:30] for _, words in MISTAKES])
def test_mistake_is_one_line(given, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are compared
        read(given)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
