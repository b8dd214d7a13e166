"""The GPT in a pipeline by hand, with every other axis: numbers, bytes at rest, and what is communicated."""

from functools import partial

import jax
import numpy as np
import pytest
from jax_steps import ACCUMULATION as A
from jax_steps import experiment_of, size_of, two_steps, worst_errors
from layouts import JAX_MANUAL_PIPELINES as LAYOUTS

from compare.judge.closed_forms.communication import measured, pipeline_parallel
from compare.numerics.parameters import parameter_count
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import lock_step
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError, Layout, Model
from jaxpar.remat import resolve_remat

L, EMBED = 4, 16
MODEL = Model(n_layer=L, n_head=2, n_embd=EMBED, block_size=10, vocab_size=257, bias=True)
REST = EMBED * (257 + 10 + 2)
"""Numbers in what pp does not split: tokens, positions, the last norm."""
BLOCKS = parameter_count(MODEL) - REST


run = partial(two_steps, "jax-manual", model=MODEL, batch_size=8)


def assert_copies_are_equal(tree) -> None:
    """Bit for bit, wherever a leaf has several devices for one part: the embedding's copies among them."""
    for leaf in jax.tree.leaves(tree):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            np.testing.assert_array_equal(data, first.setdefault(str(shard.index), data))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_one_device_and_is_really_split(layout):
    outcome = run(layout)
    errors, resident = worst_errors(outcome.numbers, run(Layout()).numbers), outcome.resident
    assert_copies_are_equal(outcome.params)
    assert max(errors.values()) <= 1e-10, errors  # measured: 1e-15, and 2e-13 of weights, which Adam divides

    # Closed form: layers are divided by pp, and all by the degrees that split it besides. Above it: what is
    # repeated along tp, and padding, of which these odd sizes have much.
    shards = {"parameters": layout.zero == 3, "gradients": layout.zero >= 2, "optimizer": layout.zero >= 1}
    for name, sharded in shards.items():
        copies = 2 if name == "optimizer" else 1
        least = 8 * copies * (BLOCKS / layout.pp + REST) / layout.tp / (layout.dp_shard if sharded else 1)
        assert len(set(resident[name])) == 1
        assert least <= resident[name][0] <= 1.15 * least, name


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_messages_and_tied_gradients_are_what_the_schedule_says(layout):
    ledger = run(layout).ledger
    ticks = lock_step(
        make_schedule(
            layout.schedule, ranks=layout.pp, microbatches=A * layout.microbatches, chunks=layout.chunks
        )
    )
    messages = int(ticks.sends_activations.sum()), int(ticks.sends_gradients.sum())
    experiment = experiment_of(layout, model=MODEL, batch_size=8)
    expected, found = pipeline_parallel("jax-manual", experiment), measured(ledger)
    permutes = {e.purpose: e for e in ledger if e.kind == "permute"}
    for purpose, calls in zip(("activations", "activation gradients"), messages, strict=True):
        assert permutes[purpose].calls == calls
        assert permutes[purpose].bytes == expected["permute", "pp", purpose]
    tied = found["all_reduce", "pp", "tied gradients"]
    least = expected["all_reduce", "pp", "tied gradients"]
    assert least <= tied <= 1.15 * least  # padding, of which these odd sizes have much
    # Nothing else goes along pp: no parameter, and no gradient of a layer.
    scalars = size_of(ledger, axis="pp", purpose="loss") + size_of(ledger, axis="pp", purpose="norm")
    assert scalars <= 2 * 8
    assert size_of(ledger, axis="pp") - scalars == tied + sum(e.bytes for e in permutes.values())


def test_what_shards_is_reduced_once_a_microbatch():
    """Layers and ends for each microbatch; under zero 3 what is in no layer is gathered once a step."""
    m, layers = A * 2, 8 * BLOCKS / 2
    ends = 8 * EMBED * (257 + 10)  # of the first rank, which has most: tokens and positions
    names = ("zero2_gpipe", "fsdp_interleaved", "shard_grad_op")
    zero2, zero3, kept = (run(LAYOUTS[name]).ledger for name in names)
    for ledger in (zero2, zero3, kept):
        scattered = size_of(ledger, kind="reduce_scatter", axis="dp_shard")
        assert scattered == pytest.approx(m * (layers + ends), rel=0.05)
    assert size_of(zero2, kind="all_gather", axis="dp_shard") == 8 * REST + layers  # after the update
    assert size_of(kept, kind="all_gather", axis="dp_shard") == 8 * REST + layers  # once, before the ticks
    # Once for the forward; once for the backward, which needs no bias: the layers keep what it needs (none).
    biases = 8 * 11 * EMBED * L / 2
    gathered = size_of(zero3, kind="all_gather", axis="dp_shard")
    assert gathered == 8 * REST + m * (2 * layers - biases)


def test_refused_by_name():
    with pytest.raises(ExperimentError, match="jax-manual has gpipe, 1f1b, interleaved"):
        ENGINES["jax-manual"].require(Layout(pp=2, schedule="zero_bubble"))


def test_what_is_recorded_as_recomputed_is_what_a_pipeline_does():
    assert resolve_remat(Layout(pp=2)) == resolve_remat(Layout()) == "dots"
    for remat in ("full", "dots", "none"):
        assert resolve_remat(Layout(pp=2, remat=remat)) == remat
