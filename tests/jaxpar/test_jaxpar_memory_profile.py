"""Memory of a compiled step by class: below what is said before it runs, and of programs that are known."""

import jax
import jax.numpy as jnp
from bounds import above_the_estimate
from jax_steps import B, T, experiment_of

from compare.spec.experiment import Layout
from jaxpar.comm.mesh import make_mesh
from jaxpar.measure.memory import memory_profile, planned_memory, resident_bytes
from jaxpar.step import compile_step
from jaxpar.train import prepare

LAYOUTS = {
    "jax-compiler": Layout(dp_shard=2, zero=2, remat="none"),
    "jax-explicit": Layout(tp=2, sequence_parallel=True),
    "jax-manual": Layout(dp_shard=2, zero=3),
}


def test_a_step_holds_its_state_its_batch_and_no_more_than_is_said():
    for engine, layout in LAYOUTS.items():
        experiment, mesh = experiment_of(layout), make_mesh(layout, platform="cpu")
        sharded, state = prepare(engine, experiment, mesh=mesh)
        step = compile_step(sharded, state, experiment)
        trees = {"parameters": state.params, "optimizer": state.opt_state}
        sizes = {name: resident_bytes(tree, list(mesh.devices.flat))[0] for name, tree in trees.items()}
        profile = memory_profile(step, **sizes)
        assert profile is not None
        peak = profile.of(0).peak
        assert peak.total == planned_memory(step)
        assert sizes.items() <= peak.bytes.items()
        assert not above_the_estimate(engine, experiment, device=0, peak=peak.total)
        tokens = 2 * B * T / layout.data_parallel
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
