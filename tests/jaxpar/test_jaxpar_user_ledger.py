"""The ledger of anybody's function: planted surprises are found with the lines that cause them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from compare.contract.ledger import UnexpectedCommunicationError, assert_communication, differences

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


def test_a_clean_step_is_what_was_expected(mesh):
    params, x = arguments(mesh)
    placed = (NamedSharding(mesh, P()), jax.tree.map(lambda leaf: leaf.sharding, params))
    step = jax.jit(jax.value_and_grad(mlp_loss), out_shardings=placed)
    ledger = jaxpar.ledger(step, params, x, mesh=mesh)
    assert not ledger.problems
    expected = {
        ("all_reduce", "model"): F32 * N * C / 2,  # this replica's rows of the output
        # This device's part of both gradients; XLA sends the loss along.
        ("all_reduce", "data"): 2 * F32 * C * H / 2 + F32,
    }
    assert_communication(ledger, expected)
    assert {row.phase for row in ledger.rows if row.axis == "model" and row.bytes > F32} == {"forward"}
    assert all("test_jaxpar_user_ledger.py:" in row.source for row in ledger.rows)
    assert "all_reduce" in str(ledger)
    with pytest.raises(UnexpectedCommunicationError, match=r"missing: all_gather over data, 8 bytes"):
        assert_communication(ledger, expected | {("all_gather", "data"): 8})


def test_a_surprise_is_named_with_its_line(mesh):
    params, x = arguments(mesh)

    def transposed(x):
        return lax.with_sharding_constraint(jnp.sin(x).T, NamedSharding(mesh, P("data", None)))

    def gathers(params, x):
        full = lax.with_sharding_constraint(params["up"], NamedSharding(mesh, P()))
        return mlp_loss(params | {"up": full}, x)

    def twice(x):
        once = lax.psum(x.sum(0), "data")
        return lax.psum(once, "data") / 2

    changes_sides = differences(jaxpar.ledger(transposed, x, mesh=mesh), {})
    assert any(
        x.startswith("unexpected: all_to_all over data") and "(transposed)" in x for x in changes_sides
    )
    allowed = {("all_reduce", "model"): None}
    (gathered,) = differences(jaxpar.ledger(gathers, params, x, mesh=mesh), allowed)
    assert gathered.startswith(f"unexpected: all_gather over model once, {F32 * C * H:,} bytes")
    for line in (changes_sides[0], gathered):
        assert "test_jaxpar_user_ledger.py:" in line
    mapped = jax.shard_map(twice, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    doubled = differences(
        jaxpar.ledger(mapped, on(mesh, (N, C), "data"), mesh=mesh), {("all_reduce", "data"): F32 * C}
    )
    assert doubled[0] == f"all_reduce over data: {2 * F32 * C:,} bytes instead of {F32 * C:,}:"
    assert len([line for line in doubled if "(twice)" in line]) == 2


# Loops and branches of one axis -----------------------------------------------------------------------------

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def ledger_over_data(function, *more, out=None, **options):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = (P("data"), *(P() for _ in more))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out or P(), **options)
    return jaxpar.ledger(mapped, X, *more, mesh=mesh)


def own(x):
    return lax.pcast(lax.psum(x, "data"), "data", to="varying")


def test_loops_are_counted_and_one_of_unknown_length_is_named():
    def looped(x):
        return lax.scan(lambda c, _: (own(jnp.sin(c)), None), x, length=5)[0]

    def in_body(x):
        loop = lax.while_loop(lambda x: x[0, 0] > 1e-3, lambda x: lax.psum(x, "data") / 4, x)
        return lax.psum(loop.sum(), "data")

    def in_condition(x):
        return lax.while_loop(lambda c: lax.psum((c * c).sum(), "data") > 1e-3, lambda c: c * 0.5, x)

    (row,) = ledger_over_data(looped, out=P("data")).rows
    assert (row.calls, row.bytes) == (5, 5 * F32 * 8 * 16 / 4)
    for ledger in (
        ledger_over_data(in_body, check_vma=False),
        ledger_over_data(in_condition, out=P("data")),
    ):
        assert ledger.problems
        assert {(row.kind, row.axis) for row in ledger.rows} == {("all_reduce", "data")}
        words = r"no known trip count, at test_jaxpar_user_ledger\.py:\d+"
        with pytest.raises(UnexpectedCommunicationError, match=words):
            assert_communication(ledger, {("all_reduce", "data"): None}, scalars=True)


def test_branches_are_counted_where_all_send_the_same_and_named_elsewhere():
    def every_fourth(x):
        return lax.scan(lambda c, i: (lax.cond(i % 4 == 3, own, lambda c: c, c), None), x, jnp.arange(8))[0]

    def in_each(x, choice):
        functions = (jnp.sin, jnp.cos, jnp.tanh, jnp.exp)
        return lax.switch(choice, [lambda x, f=f: lax.psum(f(x), "data") for f in functions], x)

    def like_one_of_ours(x):
        with jax.named_scope("runs_1_of_4"):
            return lax.psum(x, "data")

    ledger = ledger_over_data(every_fourth, out=P("data"))
    assert [row.calls for row in ledger.rows] == [8]  # at most
    (problem,) = ledger.problems
    assert "a branch with a collective in it (all_reduce), which counts as if" in problem
    ledger = ledger_over_data(in_each, 3)
    assert ([row.calls for row in ledger.rows], bool(ledger.problems)) == ([1], False)
    ledger = ledger_over_data(like_one_of_ours)
    assert ([row.calls for row in ledger.rows], bool(ledger.problems)) == ([1], True)


def test_a_mesh_of_other_devices_is_refused(mesh):
    pair = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="runs on 4 devices, and the mesh has 2"):
        jaxpar.ledger(jnp.sin, on(mesh, (N, C), "data", "model"), mesh=pair)
