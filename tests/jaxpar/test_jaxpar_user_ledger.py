"""The ledger of anybody's function: planted surprises are found with the lines that cause them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from compare.contract.ledger import UnexpectedCommunicationError, assert_communication

N, C, H = 16, 32, 64
F32 = 4


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def on(mesh, shape, *spec):
    """A shape in float32, placed."""
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def mlp_loss(params, x_NC):
    """Megatron's two products: one all-reduce over `model`, and of the mean one over `data`."""
    hidden = jnp.tanh(x_NC @ params["up"])
    return jnp.mean(jnp.square(hidden @ params["down"]))


def arguments(mesh):
    params = {"up": on(mesh, (C, H), None, "model"), "down": on(mesh, (H, C), "model", None)}
    return params, on(mesh, (N, C), "data", None)


def surprise_of(function, *arguments, mesh, expected):
    """Lines of what is not as expected, the first with this file's line."""
    with pytest.raises(UnexpectedCommunicationError) as surprise:
        assert_communication(jaxpar.ledger(function, *arguments, mesh=mesh), expected)
    lines = str(surprise.value).splitlines()
    assert any("test_jaxpar_user_ledger.py:" in line for line in lines), lines
    return lines


def test_expected_communication_passes(mesh):
    params, x = arguments(mesh)
    placed = (NamedSharding(mesh, P()), jax.tree.map(lambda leaf: leaf.sharding, params))
    step = jax.jit(jax.value_and_grad(mlp_loss), out_shardings=placed)
    ledger = jaxpar.ledger(step, params, x, mesh=mesh)
    assert not ledger.problems
    expected = {
        ("all_reduce", "model"): F32 * N * C / 2,  # this replica's rows of the output
        # This device's part of both gradients. XLA sends the loss, a lone number, in the same message.
        ("all_reduce", "data"): 2 * F32 * C * H / 2,
    }
    assert_communication(ledger, expected)
    assert {row.phase for row in ledger.rows if row.axis == "model" and row.bytes > F32} == {"forward"}
    assert all(row.source.startswith("test_jaxpar_user_ledger.py:") for row in ledger.rows)
    assert max(len(row.source) for row in ledger.rows) < 80
    assert {row.places for row in ledger.rows} == {()}  # lines of jaxpar are not the user's
    with pytest.raises(
        UnexpectedCommunicationError, match="8,196 bytes, of which 4 are single numbers, instead of"
    ):
        assert_communication(ledger, expected | {("all_reduce", "model"): None}, scalars=True)
    assert "all_reduce" in str(ledger)
    with pytest.raises(UnexpectedCommunicationError, match=r"missing: all_gather over data, 8 bytes"):
        assert_communication(ledger, expected | {("all_gather", "data"): 8})
    pair = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="runs on 4 devices, and the mesh has 2"):
        jaxpar.ledger(jnp.sin, on(mesh, (N, C), "data", "model"), mesh=pair)


def test_function_on_one_device_is_incomplete(mesh):
    """The arguments were forgotten, so nothing is sent."""
    ledger = jaxpar.ledger(jnp.sin, jnp.ones((N, C)), mesh=mesh)
    with pytest.raises(UnexpectedCommunicationError, match="incomplete: the function runs on 1 of 4 devices"):
        assert_communication(ledger, {})


def test_unexpected_communication_has_a_line(mesh):
    params, x = arguments(mesh)

    def transposed(x):
        return lax.with_sharding_constraint(jnp.sin(x).T, NamedSharding(mesh, P("data", None)))

    def gathers(params, x):
        full = lax.with_sharding_constraint(params["up"], NamedSharding(mesh, P()))
        return mlp_loss(params | {"up": full}, x)

    def twice(x):
        once = lax.psum(x.sum(0), "data")
        return lax.psum(once, "data") / 2

    first, *_ = surprise_of(transposed, x, mesh=mesh, expected={})
    assert first.startswith("unexpected: all_to_all over data")
    assert "transposed)" in first
    (gathered,) = surprise_of(gathers, params, x, mesh=mesh, expected={("all_reduce", "model"): None})
    assert gathered.startswith(f"unexpected: all_gather over model once, {F32 * C * H:,} bytes")
    mapped = jax.shard_map(twice, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    once = {("all_reduce", "data"): F32 * C}
    doubled = surprise_of(mapped, on(mesh, (N, C), "data"), mesh=mesh, expected=once)
    assert (
        doubled[0] == f"all_reduce over data: {2 * F32 * C:,} bytes instead of {F32 * C:,} (2 times as many):"
    )
    assert len([line for line in doubled if "twice)" in line]) == 2


def own(x):
    return lax.pcast(lax.psum(x, "data"), "data", to="varying")


def in_our_scope(x):
    with jax.named_scope("runs_1_of_4"):
        return own(x)


UNKNOWN = "no known trip count, at test_jaxpar_user_ledger.py:"
SCAN, WHILE = lax.scan, lax.while_loop
FOURTH = lambda c, i: (lax.cond(i % 4 == 3, own, lambda c: c, c), None)  # noqa: E731
EACH = [lambda x, f=f: own(f(x)) for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp)]
CASES = {  # a function, its calls, and words of a problem
    "scan": (lambda x: SCAN(lambda c, _: (own(jnp.sin(c)), None), x, length=5)[0], 5, ""),
    "while": (lambda x: WHILE(lambda x: x[0, 0] > 1e-3, lambda x: own(x) / 4, x), 1, UNKNOWN),
    "condition": (
        lambda x: WHILE(lambda x: lax.psum(x.sum(), "data") > 1, lambda x: x / 2, x),
        None,
        UNKNOWN,
    ),
    "branch": (
        lambda x: SCAN(FOURTH, x, jnp.arange(8))[0],
        8,
        "a branch with a collective in it (all_reduce)",
    ),
    "switch": (lambda x: lax.switch(x[0, 0].astype(int), EACH, x), 1, ""),  # alike in all branches
    "scope": (in_our_scope, 1, "in no loop of that many iterations"),
}


@pytest.mark.parametrize(("function", "calls", "problem"), CASES.values(), ids=CASES)
def test_calls_of_loops_and_branches(function, calls, problem):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    ledger = jaxpar.ledger(mapped, x, mesh=mesh)
    (row,) = ledger.rows
    assert (row.kind, row.axis) == ("all_reduce", "data")
    if calls:
        assert (row.calls, row.bytes) == (calls, calls * F32 * 8 * 16 / 4)
    assert bool(ledger.problems) == bool(problem)
    if problem:
        assert all(problem in line for line in ledger.problems), ledger.problems
        with pytest.raises(UnexpectedCommunicationError, match=re.escape(problem)):
            assert_communication(ledger, {("all_reduce", "data"): None}, scalars=True)
