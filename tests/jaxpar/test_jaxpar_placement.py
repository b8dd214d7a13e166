"""Placements: padding is removed again, shards are equal, and the rule selects the right dim."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.spec.axes import DP_SHARD, LAYER, TP
from compare.spec.experiment import Layout
from jaxpar.placement import drop_layer_dim, place

AXES = ("vocab", "embed", "heads", "mlp", "position")


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(AXES)), max_size=3, unique_by=lambda dim: dim[1]),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_padding_comes_off_and_parts_are_equal(dims, tp, shards):
    shape, axes = tuple(size for size, _ in dims), tuple(axis for _, axis in dims)
    p = place(shape, axes, Layout(tp=tp, dp_shard=shards))
    x = np.arange(1.0, math.prod(shape) + 1).reshape(shape)
    stored = p.pad(x)
    np.testing.assert_array_equal(p.unpad(stored), x)
    assert stored.shape == p.padded_shape
    assert stored.sum() == x.sum()  # padding is zero
    for dim, size in enumerate(stored.shape):
        degree = (tp if dim == p.dims.get(TP) else 1) * (shards if dim == p.dims.get(DP_SHARD) else 1)
        assert size % degree == 0
        assert size - shape[dim] < degree + tp * shards


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2))
def test_layers_are_stored_where_they_run(pp, chunks, layers, tp, shards):
    """Stage s of the model is on device s mod pp of the pipeline, as its chunk s // pp."""
    length = pp * chunks * layers
    layout = Layout(tp=tp, dp_shard=shards, pp=pp, chunks=chunks if pp > 1 else 1)
    p = place((length, 8), (LAYER, "mlp"), layout)
    x = np.arange(length * 8.0).reshape(length, 8)
    stored = p.pad(x)
    np.testing.assert_array_equal(p.unpad(stored), x)
    if pp > 1:
        assert p.axes[0] == p.spec(sharded=False)[0] == "pp"
        assert p.shard_sizes(0) == (pp, chunks * layers, chunks * layers)
        of_devices = stored.reshape(pp, chunks, layers, 8)
        for stage, of_stage in enumerate(x.reshape(pp * chunks, layers, 8)):
            np.testing.assert_array_equal(of_devices[stage % pp, stage // pp], of_stage)
    (layer,) = drop_layer_dim([p])
    assert layer.axes == p.axes[1 if pp > 1 else 0 :]


@pytest.mark.parametrize(
    ("shape", "axes", "shards", "expected"),
    [
        ((12, 8, 32), (LAYER, "embed", "mlp"), 4, 1),  # not the layers, and not what tp took
        ((12, 8), (LAYER, "mlp"), 4, 1),  # nothing else is left: within tp's part
        ((9, 20), ("position", "embed"), 4, 1),  # what divides
        ((8, 20), ("position", "embed"), 4, 0),  # the first that does, not the largest
        ((257, 20), ("position", "embed"), 8, 0),  # nothing does: the largest is padded
        ((), (), 4, None),
        ((0, 3), ("position", "embed"), 4, None),
        ((4,), (LAYER,), 4, None),
    ],
    ids=str,
)
def test_sharded_dim(shape, axes, shards, expected):
    p = place(shape, axes, Layout(tp=2, dp_shard=shards, zero=1))
    assert p.dims.get(DP_SHARD) == expected
    if axes[:1] == (LAYER,) and expected is not None:
        (layer,) = drop_layer_dim([p])
        assert (layer.shape, layer.dims[DP_SHARD]) == (shape[1:], expected - 1)
