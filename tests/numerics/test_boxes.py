"""Shards as boxes and back, and what boxes have in common: by brute force."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compare.numerics.boxes import Box, from_boxes, to_boxes
from compare.numerics.shards import Shard
from tests.support.assembly import cut


@st.composite
def shards(draw) -> tuple[tuple[int, ...], Shard]:
    """A shape and any shard of it: a box, or a range of a box's elements in any order of its dims."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    limits = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple(stop - start for start, stop in limits)
    is_flat = draw(st.booleans())
    ends = st.integers(0, math.prod(box))
    return shape, Shard(
        name="w",
        device=0,
        offset=tuple(start for start, _ in limits),
        shape=box,
        elements=tuple(sorted(draw(st.tuples(ends, ends)))) if is_flat else None,
        dim_order=tuple(draw(st.permutations(range(len(shape))))) if is_flat else (),
    )


@given(shards())
def test_boxes_and_shard_are_inverse(case):
    shape, shard = case
    tensor = np.arange(1.0, math.prod(shape) + 1).reshape(shape)
    held = cut(tensor, shard)
    boxes = list(to_boxes(shard, held))
    assert sum(box.size for box, _ in boxes) == held.size
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box, array in boxes:
        assert box.size
        np.testing.assert_array_equal(array, tensor[box.slices])
    assert sorted(x for _, array in boxes for x in array.ravel()) == sorted(held.ravel())
    read = from_boxes(shard, lambda boxes: [tensor[box.slices] for box in boxes], tensor.dtype)
    np.testing.assert_array_equal(read, held)


@given(st.integers(0, 3), st.data())
def test_overlap_of_two_boxes(dims, data):
    limits = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
    first, second = (
        Box(tuple(a for a, _ in found), tuple(b - a for a, b in found))
        for found in (data.draw(st.lists(limits, min_size=dims, max_size=dims)) for _ in range(2))
    )
    inside = [
        set(itertools.product(*(range(part.start, part.stop) for part in box.slices)))
        for box in (first, second)
    ]
    common, both = first.overlap(second), inside[0] & inside[1]
    assert (common is None) == (not both)
    if common:
        assert common.size == len(both)
        tensor = np.zeros((4,) * dims)
        tensor[first.slices] = np.arange(first.size).reshape(first.shape)
        np.testing.assert_array_equal(tensor[first.slices][common.within(first)], tensor[common.slices])


def test_elements_count_in_order_of_dims():
    tensor = np.arange(1.0, 13).reshape(4, 3)
    for order, elements in (((1, 0), [10, 8, 11, 9]), ((), [8, 9, 10, 11])):
        shard = Shard(name="w", device=1, offset=(2, 0), shape=(2, 3), elements=(1, 5), dim_order=order)
        read = from_boxes(shard, lambda boxes: [tensor[box.slices] for box in boxes], tensor.dtype)
        assert read.tolist() == cut(tensor, shard).tolist() == elements
