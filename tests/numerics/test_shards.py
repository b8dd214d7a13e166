"""Cuts of a tensor, and the tensor from its cuts: every way back, and every planted mistake."""

import itertools
import math

import msgspec
import numpy as np
import pytest
from assembly import assemble
from hypothesis import given
from hypothesis import strategies as st

from compare.numerics.shards import Shard, ShardError, cut


def arange(*shape: int) -> np.ndarray:
    return np.arange(1.0, math.prod(shape) + 1).reshape(shape)


@st.composite
def cut_tensors(draw) -> tuple[tuple[int, ...], list[Shard]]:
    """A shape, and shards that cover it: slabs of dim 0, some cut into ranges, some held twice."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    ends = st.integers(0, shape[0] if shape else 0)
    bounds = [0, *sorted(draw(st.lists(ends, max_size=2))), shape[0]] if shape else [0, 0]
    shards: list[Shard] = []
    for start, stop in itertools.pairwise(bounds):
        box = (stop - start, *shape[1:]) if shape else ()
        offset = (start, *(0 for _ in shape[1:])) if shape else ()
        order, size = tuple(draw(st.permutations(range(len(shape))))), math.prod(box)
        is_flat = draw(st.booleans())
        middle = draw(st.integers(0, size))
        for elements in ((0, middle), (middle, size)) if is_flat else (None,):
            for replica in range(draw(st.integers(1, 2))):
                shards.append(
                    Shard(
                        name="w",
                        device=len(shards),
                        offset=offset,
                        shape=box,
                        elements=elements,
                        dim_order=order if is_flat else (),
                        replica=replica,
                    )
                )
    return shape, draw(st.permutations(shards))


@given(cut_tensors())
def test_a_tensor_comes_together_from_its_cuts(case):
    shape, shards = case
    tensor = arange(*shape)
    parts = [(shard, cut(tensor, shard)) for shard in shards]
    for shard, held in parts:
        assert held.shape == shard.held_shape
        assert not np.shares_memory(held, tensor)
    np.testing.assert_array_equal(assemble(shape, parts), tensor)
    once = [(shard, held) for shard, held in parts if shard.replica == 0]
    assert sum(held.size for _, held in once) == tensor.size
    np.testing.assert_array_equal(assemble(shape, once), tensor)


@given(cut_tensors(), st.data())
def test_a_lost_part_and_a_changed_copy_are_noticed(case, data):
    shape, shards = case
    tensor = arange(*shape)
    parts = [(shard, cut(tensor, shard)) for shard in shards]
    lost = data.draw(st.integers(0, len(parts) - 1))
    shard, held = parts[lost]
    keys = [(s.offset, s.shape, s.elements) for s in shards]
    has_copy = keys.count(keys[lost]) > 1
    rest = parts[:lost] + parts[lost + 1 :]
    if held.size and not has_copy:
        with pytest.raises(AssertionError, match="no shard"):
            assemble(shape, rest)
    elif held.size:
        with pytest.raises(AssertionError, match="differs from another shard"):
            assemble(shape, [*rest, (shard, -held)])


def test_elements_count_in_the_order_of_dims_within_the_box():
    tensor = arange(4, 3)
    shard = Shard(name="w", device=1, offset=(2, 0), shape=(2, 3), elements=(1, 5), dim_order=(1, 0))
    assert cut(tensor, shard).tolist() == [10, 8, 11, 9]
    assert cut(tensor, msgspec.structs.replace(shard, dim_order=())).tolist() == [8, 9, 10, 11]


def test_copies_of_a_nan_agree_and_zeros_of_two_signs_do_not():
    shards = [Shard(name="w", device=device, offset=(0,), shape=(2,), replica=device) for device in (0, 1)]
    nan = np.array([np.nan, 1.0])
    np.testing.assert_array_equal(assemble((2,), [(shard, nan) for shard in shards]), nan)
    with pytest.raises(AssertionError, match="differs from another shard"):
        assemble((2,), list(zip(shards, (np.array([0.0, 1.0]), np.array([-0.0, 1.0])), strict=True)))


def test_a_shard_that_reaches_beyond_its_tensor_is_refused():
    shard = Shard(name="w", device=1, offset=(2,), shape=(2,))
    for changes in ({"offset": (3,)}, {"offset": (0, 0), "shape": (2, 1)}):
        with pytest.raises(ShardError, match=r"is not within \(4,\)"):
            cut(arange(4), msgspec.structs.replace(shard, **changes))


def test_a_shard_that_contradicts_itself_cannot_be_made_or_read():
    right = {"name": "w", "device": 0, "offset": (0, 0), "shape": (2, 3), "elements": (0, 6)}
    shard = Shard(**right)
    assert msgspec.json.decode(msgspec.json.encode(shard), type=Shard) == shard
    for wrong in ({"offset": (0, -1)}, {"elements": (4, 7)}, {"elements": (4, 3)}, {"dim_order": (0, 0)}):
        with pytest.raises(ShardError, match="w on device 0"):
            Shard(**right | wrong)
        with pytest.raises(msgspec.ValidationError, match="w on device 0"):
            msgspec.json.decode(msgspec.json.encode(right | wrong), type=Shard)
