"""Mistakes of sharding, and who reports each: `tests/data/type_errors.json`, a table of docs/compilers.md.

Each mistake is a few lines of a sharded product, written three times: with types (Explicit), with constraints
(Auto), and per device (`shard_map`, its check of varying axes on). Two devices, float64. An outcome is an
error, or silence: then whether the numbers are right, and which kinds of collective were sent.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from msgspec import Struct

from jaxpar.measure.ledger import ledger_of

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "type_errors.json").read_text())
WAYS = ("explicit", "auto", "manual")
AXIS, DEVICES = "x", 2
B, C, M, V = 4, 6, 8, 10

Array = jax.Array
draw = np.random.default_rng(0).standard_normal
X_BC, W_CM, W_MC, TABLE_VC = draw((B, C)), draw((C, M)), draw((M, C)), draw((V, C))
TOKENS_B = np.array([7, 1, 9, 3])


class Mistake(Struct, frozen=True, kw_only=True):
    words: str
    arguments: tuple[np.ndarray, ...]
    specs: tuple[P, ...]
    """Where the arguments live."""
    result: P
    """Where the result is to live."""
    right: Callable[..., Any]
    """On one device."""
    explicit: Callable[..., Any] | None = None
    """With casts; None, here and below: `right`, which is all that one writes."""
    auto: Callable[..., Any] | None = None
    """With constraints in the place of casts."""
    manual: Callable[..., Any] | None = None
    """The function that each device runs on its shards."""


def lookup(table: Array, tokens: Array) -> Array:
    return table[tokens]


def mlp(x: Array, up: Array, down: Array) -> Array:
    """Two products with a nonlinearity between them."""
    return jnp.tanh(x @ up) @ down


def heads(x: Array, weight: Array) -> Array:
    """A product with (3, H, D) outputs, as one of two matrices: here heads H are split."""
    return (x @ weight.reshape(C, -1)).reshape(B, 3, 2, 2)


MISTAKES = (
    Mistake(
        words="the sum after a row-parallel product is forgotten",
        arguments=(X_BC, W_CM),
        specs=(P(None, AXIS), P(AXIS, None)),
        result=P(),
        right=lambda x, w: x @ w,
    ),
    Mistake(
        words="a partial sum goes through a nonlinearity",
        arguments=(X_BC, W_CM),
        specs=(P(None, AXIS), P(AXIS, None)),
        result=P(),
        right=lambda x, w: jnp.tanh(x @ w),
        explicit=lambda x, w: reshard(
            jnp.tanh(jnp.einsum("bc,cm->bm", x, w, out_sharding=P(unreduced={AXIS}))), P()
        ),
        manual=lambda x, w: lax.psum(jnp.tanh(x @ w), AXIS),
    ),
    Mistake(
        words="a sum that is made already is made again",
        arguments=(X_BC, W_CM),
        specs=(P(None, AXIS), P(AXIS, None)),
        result=P(),
        right=lambda x, w: x @ w,
        explicit=lambda x, w: reshard(jnp.einsum("bc,cm->bm", x, w, out_sharding=P()), P()),
        manual=lambda x, w: lax.psum(lax.psum(x @ w, AXIS), AXIS),
    ),
    Mistake(
        words="the bias is added before the sum",
        arguments=(X_BC, W_CM, W_CM[0]),
        specs=(P(None, AXIS), P(AXIS, None), P()),
        result=P(),
        right=lambda x, w, b: x @ w + b,
        explicit=lambda x, w, b: reshard(
            jnp.einsum("bc,cm->bm", x, w, out_sharding=P(unreduced={AXIS})) + b, P()
        ),
        manual=lambda x, w, b: lax.psum(x @ w + b, AXIS),
    ),
    Mistake(
        words="the gather before a column-parallel product is forgotten",
        arguments=(X_BC, W_CM),
        specs=(P(AXIS, None), P(None, AXIS)),
        result=P(None, AXIS),
        right=lambda x, w: x @ w,
    ),
    Mistake(
        words="the first weight is split along the wrong dim",
        arguments=(X_BC, W_CM, W_MC),
        specs=(P(), P(AXIS, None), P(AXIS, None)),
        result=P(),
        right=mlp,
        explicit=lambda x, up, down: jnp.einsum(
            "bm,mc->bc", jnp.tanh(jnp.einsum("bc,cm->bm", x, up)), down, out_sharding=P()
        ),
        manual=lambda x, up, down: lax.psum(mlp(x, up, down), AXIS),
    ),
    Mistake(
        words="a lookup in a table whose rows are split",
        arguments=(TABLE_VC, TOKENS_B),
        specs=(P(AXIS, None), P()),
        result=P(),
        right=lookup,
        manual=lambda table, tokens: lax.psum(table[tokens], AXIS),
    ),
    Mistake(
        words="heads that are split are joined with q, k, v",
        arguments=(X_BC, draw((C, 3, 2, 2))),
        specs=(P(), P(None, None, AXIS, None)),
        result=P(None, None, AXIS, None),
        right=heads,
        manual=lambda x, w: (x @ w.reshape(C, -1)).reshape(B, 3, 1, 2),
    ),
    Mistake(
        words="rows and columns are added that another axis's dim splits",
        arguments=(X_BC, X_BC),
        specs=(P(AXIS, None), P(None, AXIS)),
        result=P(AXIS, None),
        right=lambda x, y: x + y,
    ),
    Mistake(
        words="updated shards are taken for whole weights",
        arguments=(W_CM, W_CM),
        specs=(P(), P(AXIS, None)),
        result=P(),
        right=lambda w, update: lax.scan(lambda w, _: (w - update, None), w, None, length=2)[0],
        manual=lambda w, update: lax.scan(
            lambda w, _: (lax.dynamic_slice_in_dim(w, lax.axis_index(AXIS) * 3, 3) - update, None),
            w,
            None,
            length=1,
        )[0],
    ),
    Mistake(
        words="a gradient is summed over replicas, and should be a mean",
        arguments=(W_CM, X_BC),
        specs=(P(), P(AXIS, None)),
        result=P(),
        right=lambda w, x: jax.grad(lambda w: jnp.square(x @ w).mean())(w),
        explicit=lambda w, x: DEVICES * jax.grad(lambda w: jnp.square(x @ w).mean())(w),
        auto=lambda w, x: DEVICES * jax.grad(lambda w: jnp.square(x @ w).mean())(w),
    ),
)


def outcome(mistake: Mistake, way: str) -> str | tuple[bool, list[str]]:
    """Plant a mistake: the error's type, or whether the numbers are right, and what was sent."""
    expected = np.asarray(jax.jit(mistake.right)(*mistake.arguments))
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), (AXIS,), axis_types=(kind,))
    where, written = NamedSharding(mesh, mistake.result), getattr(mistake, way) or mistake.right
    specs = {"in_specs": mistake.specs, "out_specs": mistake.result}
    function = {
        "explicit": lambda *arguments: reshard(written(*arguments), mistake.result),
        "auto": lambda *arguments: lax.with_sharding_constraint(written(*arguments), where),
        "manual": jax.shard_map(written, mesh=mesh, check_vma=True, **specs),
    }[way]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(mistake.arguments, mistake.specs, strict=True)
        ]
        try:
            found = np.asarray(jax.jit(function)(*placed))
        except Exception as error:  # of its types JAX has no public name in every version
            return type(error).__name__
        rows = ledger_of(function, *placed, mesh=mesh).rows
    right = found.shape == expected.shape and bool(np.allclose(found, expected, rtol=1e-12))
    return right, sorted({row.kind for row in rows})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.words for mistake in MISTAKES])
def test_mistake_is_reported_as_recorded(mistake, way):
    """Types of errors vary by version."""
    found, recorded = outcome(mistake, way), RECORDED[mistake.words][way]
    if isinstance(found, str):
        assert isinstance(recorded, str)
    else:
        assert list(found) == recorded


def test_types_report_more_than_manual():
    assert len(RECORDED) == len(MISTAKES)
    assert any(isinstance(one["explicit"], str) and one["manual"][0] is False for one in RECORDED.values())
