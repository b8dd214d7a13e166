"""Memory of a compiled step by class is below the estimate."""

import pytest
from msgspec.structs import replace

from compare.spec.experiment import Layout, edited
from jaxpar.measure.memory import memory_profile, planned_memory, resident_bytes
from jaxpar.programs import compile_program, trace_train
from tests.support.bounds import above_the_estimate
from tests.support.jax_steps import MODEL, B, T, engine_and_state, experiment_of

LAYOUTS = {
    "jax-compiler": Layout(dp_shard=2, zero=2, remat="none"),
    "jax-explicit": Layout(tp=2, sequence_parallel=True),
    "jax-manual": Layout(dp_shard=2, zero=3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_step_needs_at_most_the_estimate(name):
    layout = LAYOUTS[name]
    experiment = experiment_of(layout)
    engine, state = engine_and_state(name, experiment)
    step = compile_program(engine, trace_train(engine, state))
    trees = {"parameters": state.params, "optimizer": state.opt_state}
    sizes = {kind: resident_bytes(tree, list(engine.mesh.devices.flat))[0] for kind, tree in trees.items()}
    profile = memory_profile(step, **sizes)
    assert profile is not None
    peak = profile.devices[0].peak
    assert peak.total == planned_memory(step)
    assert sizes.items() <= peak.bytes.items()
    assert not above_the_estimate(name, experiment, device=0, peak=peak.total)
    tokens = 2 * B * T / layout.data_parallel
    assert 8 * tokens <= peak.bytes["temporaries"] <= 8 * tokens + 1000  # inputs and targets, and scalars


def test_loss_chunks_need_less_memory():
    model, plans = replace(MODEL, block_size=64, vocab_size=4096), []
    for chunks in (1, 8):
        spec = experiment_of(Layout(), model=model, batch_size=4)
        spec = edited(spec, {"train": {"loss_chunks": chunks}})
        engine, state = engine_and_state("jax-compiler", spec)
        plans.append(planned_memory(compile_program(engine, trace_train(engine, state))))
    assert plans[0] - plans[1] > 1.5 * 8 * 4 * 64 * 4096  # logits and gradient; an eighth is left
