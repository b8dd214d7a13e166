"""Tests on devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


@pytest.mark.devices(4, mesh={"a": 2, "b": 2}, axis_types={"b": "explicit"})
def test_mesh(mesh, size):
    assert (dict(mesh.shape), size) == ({"a": 2, "b": 2}, 3)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Explicit)
    assert jax.device_count() == 4
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("a")))
    assert len(x.sharding.device_set) == 4


@pytest.mark.devices(2)
def test_other_count(mesh):
    assert jax.device_count() == mesh.size == 2


@pytest.mark.devices(2)
def test_fails(mesh):
    print("printed")
    assert mesh.size == 3


@pytest.mark.devices(2)
def test_rank_on_devices(rank): ...
