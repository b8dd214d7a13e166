"""Memory of a compiled step by class: against XLA's own plan, closed forms, and programs that are known."""

import jax
import jax.numpy as jnp
import pytest
from bounds import above_the_bound

from compare.contract.memory_profile import MemoryProfile
from compare.judge.closed_forms.peak_memory import peak_form
from compare.spec.experiment import Experiment, Layout, Model, Optimizer, Precision, Train
from jaxpar.comm.mesh import make_mesh
from jaxpar.compilation import compile_step
from jaxpar.measure.memory_profile import memory_profile
from jaxpar.measure.usage import planned_memory
from jaxpar.measure.wire import UnreadableError, fields
from jaxpar.setup import prepare

MODEL = Model(n_layer=3, n_head=2, n_embd=32, block_size=32, vocab_size=512, bias=True)
LAYOUTS = {
    "none": Layout(remat="none"),
    "dots": Layout(remat="dots"),
    "ddp": Layout(remat="dots", dp_replicate=2),
    "fsdp": Layout(remat="dots", dp_shard=2, zero=3),
    "zero2": Layout(remat="none", dp_shard=2, zero=2),
    "kept": Layout(remat="dots", dp_shard=2, zero=3, reshard_after_forward=False),
    "tp_sp": Layout(remat="dots", tp=2, sequence_parallel=True),
    "ddp_tp": Layout(remat="none", dp_replicate=2, tp=2),
    "fsdp_tp": Layout(remat="none", dp_shard=2, zero=3, tp=2),
}


def profile_of(engine: str, layout: Layout, dtype: str) -> tuple[Experiment, MemoryProfile]:
    experiment = Experiment(
        model=MODEL,
        train=Train(batch_size=4, gradient_accumulation_steps=1),
        optimizer=Optimizer(),
        precision=Precision(dtype=dtype),
        layout=layout,
    )
    mesh = make_mesh(layout, platform="cpu")
    sharded, state = prepare(engine, experiment, mesh=mesh, remat=layout.remat)
    step = compile_step(sharded, state, experiment)
    profile = memory_profile(step, planned=planned_memory(step), vocab=[MODEL.vocab_size], width=MODEL.n_embd)
    assert profile is not None
    held = profile.of(0).peak.bytes
    options = {"device": 0, "held": held, "peak": profile.planned_bytes}
    assert above_the_bound(engine, experiment, **options) == {}
    return experiment, profile


@pytest.mark.parametrize(
    ("engine", "name", "dtype"),
    [
        ("jax-compiler", "none", "float64"),
        ("jax-manual", "ddp", "float64"),
        ("jax-manual", "fsdp", "float64"),
    ],
)
def test_a_step_against_xla_and_the_closed_form(engine, name, dtype):
    experiment, profile = profile_of(engine, LAYOUTS[name], dtype)
    peak = profile.of(0).peak
    assert 0.9 * profile.planned_bytes <= peak.total <= profile.planned_bytes
    assert sum(peak.bytes.values()) == peak.total
    assert [mark.phase for mark in profile.of(0).curve.marks] == ["forward", "backward", "update"]
    assert "head_loss" in peak.place
    form = peak_form(engine, experiment)
    assert form is not None
    whys = {kind: form.why(kind, peak.bytes[kind]) for kind in form.bytes}
    assert None not in whys.values(), whys
    assert {whys[kind] for kind in ("parameters", "optimizer", "activations")} == {""}
    assert peak.bytes["logits"] >= experiment.tokens_per_step / experiment.layout.devices * 512 * 8


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("jax-compiler", "ddp"),
        ("jax-compiler", "zero2"),
        ("jax-manual", "kept"),
        ("jax-manual", "tp_sp"),
        ("jax-manual", "ddp_tp"),
        ("jax-compiler", "fsdp_tp"),
    ],
)
def test_what_xla_does_otherwise_has_a_name_at_another_size_too(engine, name):
    """Patterns were written down after docs/memory.md's figures: they hold for a model of other sizes."""
    experiment, profile = profile_of(engine, LAYOUTS[name], "float32")
    form = peak_form(engine, experiment)
    assert form is not None
    held = profile.of(0).peak.bytes
    assert {kind: held[kind] for kind in form.bytes if form.why(kind, held[kind]) is None} == {}


def chain(*, keeps: bool) -> MemoryProfile:
    """A loss of a chain of products; with `keeps` a large array of the forward is read again in backward."""

    @jax.custom_vjp
    def read_again(x):
        return jnp.sin(x)

    read_again.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    wave = read_again if keeps else lambda x: x * 2.0

    def loss(params, x):
        for weight in params:
            x = wave(x @ weight)
        return (x @ params[0]).sum()

    def step(params, x):
        return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, x), strict=True)]

    params, x = [jnp.ones((32, 32)) * n for n in range(1, 4)], jnp.ones((4096, 32))
    compiled = jax.jit(step, donate_argnums=0).lower(params, x).compile()
    profile = memory_profile(compiled, planned=planned_memory(compiled), vocab=[], width=32)
    assert profile is not None
    return profile


def test_what_backward_reads_shows_as_activations():
    size = 4096 * 32 * 8
    few, many = (max(chain(keeps=keeps).of(0).curve.bytes["activations"]) for keeps in (False, True))
    assert many - few >= 3 * size  # the input of every wave


def test_a_damaged_message_is_refused():
    assert list(fields(b"\x08\x96\x01")) == [(1, 150)]
    for damaged in (b"\x08", b"\x0b", b"\x08\x96"):
        with pytest.raises(UnreadableError):
            list(fields(damaged))
