"""Memory of a compiled step by class: against closed forms, and programs that are known."""

import jax
import jax.numpy as jnp
import pytest
from bounds import above_the_bound

from compare.contract.memory_profile import Peak
from compare.judge.closed_forms.peak_memory import peak_form
from compare.spec.experiment import Experiment, Layout, Model, Optimizer, Precision, Train
from jaxpar.comm.mesh import make_mesh
from jaxpar.measure.memory import memory_profile, planned_memory, resident_bytes
from jaxpar.step import compile_step
from jaxpar.train import prepare

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


def peak_of(engine: str, layout: Layout, dtype: str) -> tuple[Experiment, Peak]:
    experiment = Experiment(
        model=MODEL,
        train=Train(batch_size=4, gradient_accumulation_steps=1),
        optimizer=Optimizer(),
        precision=Precision(dtype=dtype),
        layout=layout,
    )
    mesh = make_mesh(layout, platform="cpu")
    sharded, state = prepare(engine, experiment, mesh=mesh)
    step = compile_step(sharded, state, experiment)
    devices = list(mesh.devices.flat)
    trees = {"parameters": state.params, "optimizer": state.opt_state}
    profile = memory_profile(step, **{kind: resident_bytes(tree, devices)[0] for kind, tree in trees.items()})
    assert profile is not None
    peak = profile.of(0).peak
    assert peak.total == planned_memory(step)
    options = {"device": 0, "held": peak.bytes, "peak": peak.total}
    assert above_the_bound(engine, experiment, **options) == {}
    return experiment, peak


@pytest.mark.parametrize(
    ("engine", "name", "dtype"),
    [
        ("jax-compiler", "none", "float64"),
        ("jax-manual", "ddp", "float64"),
        ("jax-manual", "fsdp", "float64"),
        ("jax-compiler", "ddp", "float32"),
        ("jax-compiler", "zero2", "float32"),
        ("jax-manual", "kept", "float32"),
        ("jax-manual", "tp_sp", "float32"),
        ("jax-manual", "ddp_tp", "float32"),
        ("jax-compiler", "fsdp_tp", "float32"),
    ],
)
def test_a_step_holds_what_its_closed_form_says(engine, name, dtype):
    """tests/data/peaks.json has another size of the model: the closed form is held to two."""
    experiment, peak = peak_of(engine, LAYOUTS[name], dtype)
    form = peak_form(engine, experiment)
    assert form is not None
    assert {
        kind: peak.bytes[kind] / size
        for kind, size in form.bytes.items()
        if not form.fits(kind, peak.bytes[kind])
    } == {}
    tokens = experiment.tokens_per_step / experiment.layout.data_parallel
    assert 8 * tokens <= peak.bytes["temporaries"] <= 8 * tokens + 1000  # inputs and targets, and scalars


def chain(*, keeps: bool) -> int:
    """Temporaries of a chain of products; with `keeps` backward reads large arrays of the forward."""

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
    profile = memory_profile(compiled, parameters=sum(p.nbytes for p in params), optimizer=0)
    assert profile is not None
    assert x.nbytes <= profile.of(0).peak.bytes["temporaries"] <= x.nbytes + 100
    return profile.of(0).peak.bytes["XLA's temporaries"]


def test_what_backward_reads_is_among_the_temporaries():
    size = 4096 * 32 * 8
    assert chain(keeps=True) - chain(keeps=False) >= 2 * size


def test_a_platform_that_tells_nothing_has_no_profile():
    silent = type("Silent", (), {"memory_analysis": lambda self: None})()
    assert memory_profile(silent, parameters=1, optimizer=2) is None
    assert planned_memory(silent) == 0
