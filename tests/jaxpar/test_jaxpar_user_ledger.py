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


def on(mesh, *shape_and_spec):
    """A shape in float32, placed."""
    shape, spec = shape_and_spec
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def mlp_loss(params, x_NC):
    """Megatron's two products: one all-reduce over `model`, and of the mean one over `data`."""
    hidden = jnp.tanh(x_NC @ params["up"])
    return jnp.mean(jnp.square(hidden @ params["down"]))


@pytest.fixture
def arguments(mesh):
    params = {"up": on(mesh, (C, H), (None, "model")), "down": on(mesh, (H, C), ("model", None))}
    return params, on(mesh, (N, C), ("data", None))


def test_a_clean_step_is_what_was_expected(mesh, arguments):
    step = jax.jit(
        jax.value_and_grad(mlp_loss),
        out_shardings=(NamedSharding(mesh, P()), jax.tree.map(lambda leaf: leaf.sharding, arguments[0])),
    )
    ledger = jaxpar.ledger(step, *arguments, mesh=mesh)
    assert ledger.is_complete
    expected = {
        ("all_reduce", "model"): F32 * N * C / 2,  # this replica's rows of the output
        # This device's part of both gradients; XLA sends the loss along.
        ("all_reduce", "data"): 2 * F32 * C * H / 2 + F32,
    }
    assert_communication(ledger, expected)
    phases = {row.phase for row in ledger.rows if row.axis == "model" and row.bytes > F32}
    assert phases == {"forward"}
    assert all("test_jaxpar_user_ledger.py:" in row.source for row in ledger.rows)
    assert "all_reduce" in str(ledger)
    with pytest.raises(UnexpectedCommunicationError, match=r"missing: all_gather over data, 8 bytes"):
        assert_communication(ledger, expected | {("all_gather", "data"): 8})


def test_an_activation_that_changes_sides_is_named_with_its_line(mesh):
    x = on(mesh, (N, C), ("data", None))

    def transposed(x):
        return lax.with_sharding_constraint(jnp.sin(x).T, NamedSharding(mesh, P("data", None)))

    ledger = jaxpar.ledger(transposed, x, mesh=mesh)
    with pytest.raises(UnexpectedCommunicationError, match=r"unexpected: all_to_all over data .*transposed"):
        assert_communication(ledger, {})


def test_a_gather_of_what_should_stay_sharded_is_named_with_its_line(mesh, arguments):
    def gathers(params, x):
        whole = lax.with_sharding_constraint(params["up"], NamedSharding(mesh, P()))
        return mlp_loss(params | {"up": whole}, x)

    ledger = jaxpar.ledger(gathers, *arguments, mesh=mesh)
    allowed = {("all_reduce", "model"): None}
    (line,) = differences(ledger, allowed)
    assert line.startswith(f"unexpected: all_gather over model once, {F32 * C * H:,} bytes")
    assert "test_jaxpar_user_ledger.py:" in line


def test_a_reduction_that_is_done_twice_has_twice_the_bytes(mesh):
    def twice(x):
        once = lax.psum(x.sum(0), "data")
        return lax.psum(once, "data") / 2

    mapped = jax.shard_map(twice, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    ledger = jaxpar.ledger(mapped, on(mesh, (N, C), ("data",)), mesh=mesh)
    found = differences(ledger, {("all_reduce", "data"): F32 * C})
    assert found[0] == f"all_reduce over data: {2 * F32 * C:,} bytes instead of {F32 * C:,}:"
    assert len([line for line in found if "(twice)" in line]) == 2


def test_loops_are_counted_and_one_of_unknown_length_is_named(mesh):
    def looped(x):
        body = lambda carry, _: (lax.pcast(lax.psum(jnp.sin(carry), "data"), "data", to="varying"), None)  # noqa: E731
        return lax.scan(body, x, length=5)[0]

    def until_small(x):
        def body(x):
            return lax.psum(x, "data") / 4

        return lax.psum(lax.while_loop(lambda x: x[0, 0] > 1e-3, body, x).sum(), "data")

    x = on(mesh, (N, C), ("data",))
    spread = {"mesh": mesh, "in_specs": P("data")}
    (row,) = jaxpar.ledger(jax.shard_map(looped, **spread, out_specs=P("data")), x, mesh=mesh).rows
    assert (row.calls, row.bytes) == (5, 5 * F32 * N * C / 2)
    unknown = jax.shard_map(until_small, **spread, out_specs=P(), check_vma=False)
    ledger = jaxpar.ledger(unknown, x, mesh=mesh)
    assert not ledger.is_complete
    assert {row.axis for row in ledger.rows} == {"data"}
    with pytest.raises(
        UnexpectedCommunicationError, match=r"incomplete: a loop with a collective .*user_ledger\.py:\d+"
    ):
        assert_communication(ledger, {("all_reduce", "data"): None}, scalars=True)


def over_data(function, *specs, out):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return mesh, jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)


X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def test_the_condition_of_a_loop_is_seen():
    """Conjugate gradients: how often it runs is not known, and said."""

    def until_converged(x):
        return lax.while_loop(lambda c: lax.psum((c * c).sum(), "data") > 1e-3, lambda c: c * 0.5, x)

    mesh, function = over_data(until_converged, P("data"), out=P("data"))
    ledger = jaxpar.ledger(function, X, mesh=mesh)
    assert not ledger.is_complete
    assert [row.kind for row in ledger.rows] == ["all_reduce"]
    with pytest.raises(UnexpectedCommunicationError, match="no known trip count"):
        assert_communication(ledger, {}, scalars=True)


def test_branches_are_counted_where_all_send_the_same_and_named_elsewhere():
    def every_fourth(x):
        send = lambda c: lax.pcast(lax.psum(c, "data"), "data", to="varying")  # noqa: E731
        turn = lambda c, i: (lax.cond(i % 4 == 3, send, lambda c: c, c), None)  # noqa: E731
        return lax.scan(turn, x, jnp.arange(8))[0]

    mesh, function = over_data(every_fourth, P("data"), out=P("data"))
    ledger = jaxpar.ledger(function, X, mesh=mesh)
    assert [row.calls for row in ledger.rows] == [8]  # at most
    assert len(ledger.problems) == 1
    assert "a branch with a collective in it (all_reduce), which counts as if" in ledger.problems[0]

    def in_both(x, choice):
        first, second = (lambda x, f=f: lax.psum(f(x), "data") for f in (jnp.sin, jnp.cos))
        return lax.cond(choice, first, second, x)

    def in_each(x, choice):
        functions = (jnp.sin, jnp.cos, jnp.tanh, jnp.exp)
        return lax.switch(choice, [lambda x, f=f: lax.psum(f(x), "data") for f in functions], x)

    for choose, choice in ((in_both, True), (in_each, 3)):
        mesh, function = over_data(choose, P("data"), P(), out=P())
        ledger = jaxpar.ledger(function, X, choice, mesh=mesh)
        assert ledger.is_complete
        assert [row.calls for row in ledger.rows] == [1]


def test_a_scope_that_looks_like_one_of_ours_deletes_nothing():
    def summed(x):
        with jax.named_scope("runs_1_of_4"):
            return lax.psum(x, "data")

    mesh, function = over_data(summed, P("data"), out=P())
    ledger = jaxpar.ledger(function, X, mesh=mesh)
    assert [row.calls for row in ledger.rows] == [1]
    assert not ledger.is_complete


def test_gradients_that_are_summed_by_hand_have_no_phase():
    """Neither autodiff nor a purpose says when: the step of data parallelism, and that of an optimizer."""

    def step(w, x):
        return lax.psum(jax.grad(lambda w: jnp.tanh(x @ w).sum())(lax.pcast(w, "data", to="varying")), "data")

    mesh, function = over_data(step, P(), P("data"), out=P())
    ledger = jaxpar.ledger(function, jax.ShapeDtypeStruct((16, 4), jnp.float32), X, mesh=mesh)
    assert {row.phase for row in ledger.rows} == {""}


def test_they_have_none_beside_what_autodiff_made(mesh):
    """Split by tensor, too: what forward and backward send has a phase, and the sum by hand is no update."""

    def step(up, down, x):
        out = lambda weights: lax.psum(jnp.tanh(x @ weights[0]) @ weights[1], "model")  # noqa: E731
        gradients = jax.grad(lambda weights: jnp.square(out(weights)).sum())((up, down))
        return jax.tree.map(lambda gradient: lax.psum(gradient, "data"), gradients)

    split = (P(None, "model"), P("model", None))
    function = jax.shard_map(
        step, mesh=mesh, in_specs=(*split, P("data", None)), out_specs=split, check_vma=False
    )
    shapes = (on(mesh, (C, H), split[0]), on(mesh, (H, C), split[1]), on(mesh, (N, C), ("data", None)))
    rows = jaxpar.ledger(function, *shapes, mesh=mesh).rows
    assert {row.phase for row in rows if row.axis == "data"} == {""}
    assert {row.phase for row in rows if row.axis == "model"} == {"forward", "backward"}


def test_a_mesh_of_other_devices_is_refused(mesh):
    pair = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="runs on 4 devices, and the mesh has 2"):
        jaxpar.ledger(jnp.sin, on(mesh, (N, C), ("data", "model")), mesh=pair)
