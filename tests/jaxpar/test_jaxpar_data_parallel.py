"""Data parallelism: numbers of one device, messages of each gradient_sync, and the plan of buckets."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.spec.experiment import Layout
from jaxpar.manual.data_parallel import bucket_plan
from tests.support.jax_steps import N, size_of, two_steps, worst_errors

# The model has 16 leaves. Four are larger than a quarter of a 50 kB bucket, and have their own messages.
MESSAGES = {"naive": 16, "flat": 1, "bucketed": 4 + 1}


@pytest.mark.parametrize("sync", MESSAGES)
def test_gradient_sync_sets_message_count(sync):
    outcome = two_steps("jax-manual", Layout(dp_replicate=2, gradient_sync=sync, bucket_mb=0.05))
    assert max(worst_errors(outcome).values()) <= 1e-10
    (row,) = [row for row in outcome.ledger if row.purpose == "gradients"]
    assert (row.kind, row.calls, row.bytes) == ("all_reduce", MESSAGES[sync], 8 * N)


@pytest.mark.parametrize("engine", ["jax-compiler", "jax-explicit"])
def test_gradients_are_reduced_once(engine):
    outcome = two_steps(engine, Layout(dp_replicate=2))
    assert max(worst_errors(outcome).values()) <= 1e-10
    assert 8 * N <= size_of(outcome.ledger, axis="dp_replicate") <= 8 * N + 64  # and scalars


@given(
    st.lists(st.tuples(st.sampled_from(["float32", "float64"]), st.integers(0, 50)), max_size=12),
    st.integers(0, 200),
)
def test_bucket_plan_copies_small_leaves(leaves, limit):
    plan = bucket_plan(leaves, limit=limit)
    assert sorted(leaf for bucket in plan for leaf in bucket) == list(range(len(leaves)))
    small = {leaf for leaf, (_, size) in enumerate(leaves) if 4 * size < limit}
    assert all(bucket[0] in small or len(bucket) == 1 for bucket in plan)
    for dtype in {leaves[leaf][0] for leaf in small}:
        joined = [bucket for bucket in plan if bucket[0] in small and leaves[bucket[0]][0] == dtype]
        order = [leaf for bucket in joined for leaf in bucket]
        assert order == sorted((leaf for leaf in small if leaves[leaf][0] == dtype), reverse=True)
        sizes = [[leaves[leaf][1] for leaf in bucket] for bucket in joined]
        assert all(sum(bucket) <= limit for bucket in sizes)
        assert all(sum(bucket) + following[0] > limit for bucket, following in itertools.pairwise(sizes))
