"""Data parallelism over any pytree: four devices against one, in float64, and what was asked is what runs."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from compare.contract.communication import summed
from compare.spec.experiment import Layout
from jaxpar.comm import collectives
from jaxpar.comm.collectives import KEEP_COLLECTIVES_APART, all_reduce_mean, to_varying
from jaxpar.comm.mesh import make_mesh
from jaxpar.compiler import data_parallel as by_compiler
from jaxpar.manual import data_parallel as by_hand
from jaxpar.measure.ledger import communications
from jaxpar.step import accumulated_gradients

AXIS, REPLICAS, ACCUMULATION, ROWS = "dp_replicate", 4, 3, 8


def loss(params, batch):
    """No model of ours: a tuple in a dict, a scalar, two dtypes, an empty leaf, and one that nothing uses."""
    hidden = jnp.tanh(batch["x"] @ params["layers"][0] + params["shift"])
    out = hidden @ params["layers"][1].astype(jnp.float64) * params["scale"]
    return jnp.mean((out - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def params():
    generator = np.random.default_rng(0)
    return {
        "empty": np.zeros((0, 3)),
        "layers": (generator.normal(size=(5, 7)), generator.normal(size=(7, 3)).astype(np.float32)),
        "scale": np.float64(1.5),
        "shift": generator.normal(size=7),
        "unused": generator.normal(size=2),
    }


@pytest.fixture(scope="module")
def batch():
    generator = np.random.default_rng(1)
    shape = (ACCUMULATION, ROWS)
    return {"x": generator.normal(size=(*shape, 5)), "y": generator.normal(size=(*shape, 3))}


@pytest.fixture(scope="module")
def expected(params, batch):
    """Plain jax.grad on one device, over all rows at once."""
    together = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    return jax.value_and_grad(loss)(params, together)


def compile_by_hand(params, batch, **how):
    mesh = make_mesh(Layout(dp_replicate=REPLICAS), platform="cpu")

    def gradients_of(params, batch):
        value, gradients = accumulated_gradients(loss, to_varying(params, AXIS), batch)
        return all_reduce_mean(value, AXIS), by_hand.synchronize_gradients(gradients, **how)

    mapped = collectives.per_device(gradients_of, mesh=mesh, in_specs=(P(), P(None, AXIS)), out_specs=P())
    return jax.jit(mapped).lower(params, batch).compile(compiler_options=KEEP_COLLECTIVES_APART)


def compile_by_compiler(params, batch):
    mesh = make_mesh(Layout(dp_replicate=REPLICAS), platform="cpu")
    gradients_of = functools.partial(
        by_compiler.synchronize_gradients, functools.partial(accumulated_gradients, loss), mesh=mesh
    )
    whole = NamedSharding(mesh, P())
    jitted = jax.jit(
        gradients_of, in_shardings=(whole, by_compiler.batch_sharding(mesh)), out_shardings=whole
    )
    return jitted.lower(params, batch).compile()


def worst(actual, expected) -> float:
    """Largest error of a float64 leaf, relative to the largest value of that leaf."""
    return max(
        float(np.max(np.abs(a - e), initial=0) / np.max(np.abs(e), initial=1e-30))
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
        if e.dtype == np.float64
    )


def gradient_calls(compiled) -> int:
    entries = communications(compiled.as_text(), Layout(dp_replicate=REPLICAS).axes)
    return sum(entry.calls for entry in entries if entry.kind == "all_reduce")


# Leaves: (5, 7), scalar, (7,), (2,) in float64, 45 elements; (7, 3) in float32; and 1 for the loss.
# Of the leaf that nothing uses the gradient is a constant 0: XLA drops naive's all-reduce of it.
# Buckets of 240 bytes: (5, 7) and (7, 3) have 280 and 84, each more than a quarter, and are sent as they are.
METHODS = {
    "naive": ({"method": "naive"}, 4 + 1),
    "flat": ({"method": "flat"}, 2 + 1),
    "bucketed": ({"method": "bucketed", "bucket_mb": 240e-6}, 3 + 1),
    "one bucket": ({"method": "bucketed"}, 2 + 1),
}


@pytest.mark.parametrize(("how", "calls"), METHODS.values(), ids=METHODS)
def test_by_hand_equals_one_device(params, batch, expected, how, calls):
    compiled = compile_by_hand(params, batch, **how)
    actual = compiled(params, batch)
    assert worst(actual, expected) <= 1e-12  # measured 4e-16
    np.testing.assert_allclose(actual[1]["layers"][1], expected[1]["layers"][1], rtol=2e-6)
    assert gradient_calls(compiled) == calls
    entries = communications(compiled.as_text(), Layout(dp_replicate=REPLICAS).axes)
    assert [e.calls for e in entries if e.purpose == "metrics"] == [1]  # the loss: no gradient, however small


def test_by_compiler_equals_one_device_and_reduces_once(params, batch, expected):
    compiled = compile_by_compiler(params, batch)
    assert worst(compiled(params, batch), expected) <= 1e-12
    (entry,) = summed(communications(compiled.as_text(), Layout(dp_replicate=REPLICAS).axes))
    used = sum(leaf.nbytes for name, leaf in params.items() if name not in ("layers", "unused"))
    used += sum(leaf.nbytes for leaf in params["layers"])
    assert entry.bytes == used + 8  # and the loss; three times that if it reduced every microbatch


@given(
    st.lists(st.tuples(st.sampled_from(["float32", "float64"]), st.integers(0, 50)), max_size=12),
    st.integers(0, 200),
)
def test_bucket_plan_copies_small_leaves_only_into_as_few_buckets_as_may_be(leaves, limit):
    plan = by_hand.bucket_plan(leaves, limit=limit)
    assert sorted(leaf for bucket in plan for leaf in bucket) == list(range(len(leaves)))
    small = {leaf for leaf, (_, size) in enumerate(leaves) if 4 * size < limit}
    assert all(bucket[0] in small or len(bucket) == 1 for bucket in plan)
    for kind in {leaves[leaf][0] for leaf in small}:
        joined = [bucket for bucket in plan if bucket[0] in small and leaves[bucket[0]][0] == kind]
        order = [leaf for bucket in joined for leaf in bucket]
        assert order == sorted((leaf for leaf in small if leaves[leaf][0] == kind), reverse=True)
        sizes = [[leaves[leaf][1] for leaf in bucket] for bucket in joined]
        assert all(sum(bucket) <= limit for bucket in sizes)
        assert all(sum(bucket) + following[0] > limit for bucket, following in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("limit", "plan"),
    {
        0: [[4], [3], [2], [1], [0]],
        8: [[4], [3], [2], [1], [0]],
        12: [[4], [3], [2, 1], [0]],  # 4 is of another kind, 3 is a third of a bucket
        math.inf: [[4], [3, 2, 1, 0]],
    }.items(),
)
def test_bucket_plan(limit, plan):
    assert by_hand.bucket_plan([("a", 4), ("a", 2), ("a", 2), ("a", 4), ("b", 2)], limit=limit) == plan
