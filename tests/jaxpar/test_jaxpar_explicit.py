"""jax-explicit: what is summed, and when; pipelines; mistakes that types refuse as the step is traced."""

from functools import partial
from unittest.mock import patch

import jax
import jax_steps
import pytest
from jax_steps import Outcome, size_of, two_steps, worst_errors
from layouts import JAX_COMPILER_PIPELINES as PIPELINES
from type_mistakes import MISTAKES as PLANTED
from type_mistakes import Found, find, read_type_errors

from compare.judge.closed_forms.communication import fully_sharded
from compare.numerics.parameters import parameter_count
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout, Model
from jaxpar.comm.mesh import make_mesh
from jaxpar.compilation import compile_step
from jaxpar.explicit import data_parallel, tensor_parallel
from jaxpar.explicit import fully_sharded as lesson
from jaxpar.remat import resolve_remat
from jaxpar.setup import prepare

(ENGINE,) = (name for name, engine in STUDIED.items() if engine.sends_by == "types")
MODEL = Model(n_layer=4, n_head=2, n_embd=16, block_size=10, vocab_size=257, bias=True)
N = parameter_count(MODEL)
BATCH = 8
run = partial(two_steps, ENGINE, model=MODEL, batch_size=BATCH)


def errors_of(outcome: Outcome) -> dict[str, float]:
    one_device = two_steps("jax-compiler", Layout(), model=MODEL, batch_size=BATCH)
    return worst_errors(outcome.numbers, one_device.numbers)


def test_gradients_of_all_passes_are_summed_once():
    outcome = run(Layout(dp_replicate=2))
    (row,) = [row for row in outcome.ledger if row.purpose == "gradients"]
    assert (row.kind, row.axis, row.calls, row.bytes) == ("all_reduce", "dp_replicate", 1, 8 * N)


def test_a_gather_in_forward_is_a_sum_in_backward_and_replicas_are_summed_once():
    layout = Layout(dp_replicate=2, dp_shard=2, zero=3)
    experiment = jax_steps.experiment_of(layout, model=MODEL, batch_size=BATCH)
    expected, outcome = fully_sharded(ENGINE, experiment), run(layout)
    purposes = ("gradients", "parameters")
    sizes = {(row.axis, row.purpose): row.bytes for row in outcome.ledger if row.purpose in purposes}
    scattered = expected["reduce_scatter", "dp_shard", "gradients"]
    assert scattered <= sizes["dp_shard", "gradients"] <= 1.01 * scattered  # 257 rows are padded
    assert sizes["dp_shard", "parameters"] >= expected["all_gather", "dp_shard", "parameters"]
    assert 4 * N <= sizes["dp_replicate", "gradients"] <= 1.01 * 4 * N
    assert max(errors_of(outcome).values()) <= 1e-10


@pytest.mark.parametrize("name", ["ddp_pp", "fsdp_interleaved", "tp_sp_pp"])
def test_a_pipeline_equals_one_device_and_sums_its_ends_once(name):
    outcome = run(PIPELINES[name])
    errors = errors_of(outcome)
    assert max(errors.values()) <= 1e-10, errors
    assert size_of(outcome.ledger, kind="permute", axis="pp") > 0
    ends = [row for row in outcome.ledger if "pp" in row.axis and row.purpose == "gradients"]
    assert sum(row.bytes for row in ends) <= 8 * (N - 4 * 12 * 16 * 16)  # once, and no layer's


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
        lambda: patch.object(lesson, "gather", lambda params, placements, mesh: params),
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
    spec = jax_steps.experiment_of(layout, model=MODEL, batch_size=BATCH)
    mesh = make_mesh(layout, platform="cpu")
    with plant():
        sharded, state = prepare(ENGINE, spec, mesh=mesh, remat=resolve_remat(layout))
        with pytest.raises(Exception, match=words) as refused:
            compile_step(sharded, state, spec)
    assert type(refused.value).__name__ in REFUSALS


def test_planted_mistakes_are_kept_as_they_are_found():
    """Errors' words are a version's; who says something, what is right and what is sent are not."""

    def told(found: Found) -> dict[str, tuple]:
        return {way: (bool(one.error), one.right, one.sent) for way, one in found.outcomes.items()}

    kept = {one.mistake: told(one) for one in read_type_errors()}
    assert {mistake.words: told(find(mistake)) for mistake in PLANTED} == kept
    assert any(
        not one["manual"][0] and one["manual"][1] is False and one["explicit"][0] for one in kept.values()
    )
