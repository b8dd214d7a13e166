"""The benchmark's own check of results: a collective that gives one wrong element is counted."""

import jax.numpy as jnp
import pytest
from jax import lax

from compare.side.collective_bench import KINDS, CollectiveCase, CollectiveRequest
from compare.spec.experiment import Layout
from jaxpar.comm.mesh import make_mesh
from jaxpar.measure import bench


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_element_is_counted(monkeypatch, kind):
    mesh = make_mesh(Layout(dp_replicate=4), platform="cpu")
    request = CollectiveRequest(implementations=("xla",), cases=(), ranks=4, row_s=1e-4)
    case, call = CollectiveCase(kind, 512), bench.OPERATIONS[kind]
    assert bench.time_case("xla", case, mesh, request).wrong == 0

    def damaged(x, platform):
        result = call(x, platform=platform)
        is_last = lax.axis_index(bench.AXIS) == 3
        return result + jnp.where(is_last & (jnp.arange(result.size) == 0), 1.0, 0.0)

    monkeypatch.setitem(bench.OPERATIONS, kind, damaged)
    assert bench.time_case("xla", case, mesh, request).wrong == 1
