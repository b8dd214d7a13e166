"""jax-explicit: mistakes that types refuse as the step is traced, and how others find them."""

import json
from unittest.mock import patch

import jax
import pytest
from msgspec.structs import replace

from compare.spec.experiment import Layout, Model, edited
from jaxpar.explicit import data_parallel, tensor_parallel
from jaxpar.explicit import fully_sharded as lesson
from jaxpar.programs import trace_train
from tests.support.jax_steps import engine_and_state, experiment_of
from tests.support.type_mistakes import MISTAKES as PLANTED
from tests.support.type_mistakes import RECORDED, outcomes

MISTAKES = {
    "a sum that nobody asks for": (
        Layout(tp=2),
        lambda: patch.object(tensor_parallel, "UNREDUCED", None),
        "ambiguous how the output should be sharded",
    ),
    "parts that nobody sums": (
        Layout(dp_replicate=2),
        lambda: patch.object(data_parallel, "reshard", lambda gradients, types: gradients),
        "unreduced",
    ),
    "a layer that nobody gathers": (
        Layout(dp_shard=2, zero=3),
        lambda: patch.object(lesson, "gather", lambda params, placements: params),
        "shape|shard",
    ),
    "activations that are whole, and taken for parts of a sequence": (
        Layout(tp=2, sequence_parallel=True),
        lambda: patch.object(tensor_parallel, "REDUCED", jax.P(None, "tp")),
        "sharded",
    ),
}


REFUSALS = ("ShardingTypeError", "NotImplementedError", "TypeError", "ValueError")
"""Of JAX's types; of the first there is no public name."""


@pytest.mark.parametrize(("layout", "plant", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_forgotten_cast_is_refused_when_the_step_is_traced(layout, plant, words):
    spec = experiment_of(layout)
    with plant():
        engine, state = engine_and_state("jax-explicit", spec)
        with pytest.raises(Exception, match=words) as refused:
            trace_train(engine, state)
    assert type(refused.value).__name__ in REFUSALS


def test_dims_of_one_leave_no_type_open():
    """One head, one position of a part, one row for each replica: what is reshaped says where it is split."""
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


def test_planted_mistakes_are_kept_as_they_are_found():
    """Errors' types are a version's; who says something, what is right and what is sent are not."""

    def told(outcomes: dict) -> dict:
        return {way: "" if isinstance(found, str) else found for way, found in outcomes.items()}

    kept = json.loads(RECORDED.read_text())
    for mistake in PLANTED:
        now = json.loads(json.dumps(outcomes(mistake)))
        assert told(now) == told(kept[mistake.words]), mistake.words
    assert len(kept) == len(PLANTED)
    assert any(isinstance(one["explicit"], str) and one["manual"][0] is False for one in kept.values())
