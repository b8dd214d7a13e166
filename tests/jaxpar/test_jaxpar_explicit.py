"""jax-explicit: mistakes that types reject when the step is traced, and who else reports them."""

import json
from unittest.mock import patch

import jax
import pytest
from msgspec.structs import replace

from compare.spec.experiment import Layout, Model, edited
from jaxpar.derivatives import matmul
from jaxpar.explicit import data_parallel, tensor_parallel
from jaxpar.explicit import fully_sharded as lesson
from jaxpar.programs import trace_train
from tests.support.jax_steps import engine_and_state, experiment_of
from tests.support.type_mistakes import MISTAKES as PLANTED
from tests.support.type_mistakes import RECORDED, outcomes

MISTAKES = {
    "a missing sum": (
        Layout(tp=2),
        lambda: patch.object(tensor_parallel, "row_matmul", matmul),
        "ambiguous how the output should be sharded",
    ),
    "parts without a sum": (
        Layout(dp_replicate=2),
        lambda: patch.object(data_parallel, "sum_replicas", lambda gradients, placements, sharded: gradients),
        "unreduced",
    ),
    "a layer without a gather": (
        Layout(dp_shard=2, zero=3),
        lambda: patch.object(lesson, "gather", lambda params, placements: params),
        "shape|shard",
    ),
    "full activations as parts of a sequence": (
        Layout(tp=2, sequence_parallel=True),
        lambda: patch.object(tensor_parallel, "enter_region", lambda x: jax.reshard(x, jax.P(None, "tp"))),
        "sharded",
    ),
}


REFUSALS = ("ShardingTypeError", "NotImplementedError", "TypeError", "ValueError")
"""Error types of JAX. ShardingTypeError has no public name."""


@pytest.mark.parametrize(("layout", "plant", "words"), MISTAKES.values(), ids=MISTAKES)
def test_missing_cast_is_rejected_in_trace(layout, plant, words):
    spec = experiment_of(layout)
    with plant():
        engine, state = engine_and_state("jax-explicit", spec)
        with pytest.raises(Exception, match=words) as refused:
            trace_train(engine, state)
    assert type(refused.value).__name__ in REFUSALS


def test_dims_of_one_have_types():
    """One head, one position of a part, one row a replica: reshapes give the sharding of dims of one."""
    interleaved = {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2}
    one = Model(n_layer=4, n_head=1, n_embd=3, block_size=1, vocab_size=5)
    two = replace(one, n_head=2, n_embd=2, block_size=2)
    for layout, model in (
        (Layout(**interleaved), one),
        (Layout(**interleaved, dp_shard=2, zero=3), one),
        (Layout(dp_shard=2, zero=1), replace(one, n_embd=1)),
        (Layout(dp_shard=2, dp_replicate=2, zero=2), one),
        (Layout(tp=2, dp_replicate=2), two),
        (Layout(tp=2, dp_shard=2, zero=3), two),
    ):
        spec = experiment_of(layout, model=model, batch_size=layout.data_parallel * layout.microbatches)
        spec = edited(spec, {"train": {"loss_chunks": 1 if layout.pp > 1 else model.block_size}})
        trace_train(*engine_and_state("jax-explicit", spec))


def test_planted_mistakes_match_their_record():
    """The record has the reporter, numbers and messages of a mistake. Types of errors vary by version."""

    def without_types(outcomes: dict) -> dict:
        return {way: "" if isinstance(found, str) else found for way, found in outcomes.items()}

    kept = json.loads(RECORDED.read_text())
    for mistake in PLANTED:
        now = json.loads(json.dumps(outcomes(mistake)))
        assert without_types(now) == without_types(kept[mistake.words]), mistake.words
    assert len(kept) == len(PLANTED)
    assert any(isinstance(one["explicit"], str) and one["manual"][0] is False for one in kept.values())
