"""Pipelines by hand in JAX, for any model in pieces: the docstring's example in every schedule."""

import inspect
import textwrap
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import lock_step
from compare.spec.axes import LAYER, PP
from compare.spec.experiment import ExperimentError, Layout
from jaxpar.comm.collectives import per_device
from jaxpar.faults import plant
from jaxpar.manual import pipeline_parallel
from jaxpar.placement import place
from jaxpar.problem import Pieces

M, B, WIDTH, HIDDEN, LAYERS = 8, 3, 5, 4, 8
PUBLIC = ("mark_varying", "run_pipeline", "sum_tied_gradients")


def example(*, schedule: str, devices: int, chunks: int = 1, keeps: bool = False):
    """The docstring's pieces and its step, for a schedule; and where its parameters live."""
    place_leaf = partial(place, split={}, degrees={PP: devices}, chunks=chunks)
    placements = {
        "embedding": place_leaf((WIDTH, HIDDEN), ("embed", "hidden")),
        "blocks": place_leaf((LAYERS, HIDDEN, HIDDEN), (LAYER, "in", "out")),
    }
    text = inspect.getdoc(pipeline_parallel.run_pipeline).partition("Example, inside `shard_map`")[2]
    code = textwrap.dedent(text.partition(":\n\n")[2])
    assert 'make_schedule("1f1b", ranks=4, microbatches=8)' in code
    code = code.replace(
        '"1f1b", ranks=4, microbatches=8', f'"{schedule}", ranks={devices}, microbatches={M}, chunks={chunks}'
    )
    mesh = Mesh(np.array(jax.devices()[:devices]), ("pp",))
    names = {
        **dict(jax=jax, jnp=jnp, lax=lax, P=P, Pieces=Pieces, mesh=mesh, placements=placements),
        **dict(make_schedule=make_schedule, lock_step=partial(lock_step, keeps=keeps), per_device=per_device),
        **{name: getattr(pipeline_parallel, name) for name in PUBLIC},
    }
    exec(code, names)
    return names["pieces"], names["step"], placements


def errors_of_the_example(*, fault: str = "", **shape) -> dict[str, float]:
    """Largest errors of its loss and gradients, against autodiff of the whole model."""
    with plant(fault, engine="jax-manual", layout=Layout(pp=2)) if fault else nullcontext():
        pieces, step, placements = example(**shape)
        draw = np.random.default_rng(0).standard_normal
        params = {"embedding": draw((WIDTH, HIDDEN)), "blocks": draw((LAYERS, HIDDEN, HIDDEN))}
        batch = {"x": draw((M, B, WIDTH)), "y": draw((M, B, WIDTH))}
        value, gradients = step({name: p.pad(params[name]) for name, p in placements.items()}, batch)

    def whole(params, batch):
        one = jax.tree.map(np.concatenate, batch)
        return pieces.loss(params, pieces.layers(params, pieces.embed(params, one), one, 0), one)

    expected, of_whole = jax.value_and_grad(whole)(params, batch)
    errors = {"loss": float(abs(value - expected))}
    for name, p in placements.items():
        errors[name] = float(np.abs(p.unpad(np.asarray(gradients[name])) - of_whole[name]).max())
    return errors


@pytest.mark.parametrize(
    ("schedule", "devices", "chunks"),
    [("gpipe", 4, 1), ("1f1b", 4, 1), ("1f1b", 2, 1), ("interleaved", 2, 2), ("interleaved", 2, 4)],
)
@pytest.mark.parametrize("keeps", [False, True], ids=["anew", "kept"])
def test_the_example_of_the_docstring_equals_autodiff_of_the_whole(schedule, devices, chunks, keeps):
    errors = errors_of_the_example(schedule=schedule, devices=devices, chunks=chunks, keeps=keeps)
    assert max(errors.values()) <= 1e-14, errors


def test_a_forward_that_is_kept_is_not_computed_again():
    """One tanh in the program's forward, and another only where backward begins with a forward."""

    def forwards(*, keeps: bool) -> int:
        _, step, placements = example(schedule="1f1b", devices=4, keeps=keeps)
        params = {name: np.zeros(p.stored_shape) for name, p in placements.items()}
        batch = dict.fromkeys(("x", "y"), np.zeros((M, B, WIDTH)))
        hlo = step.lower(params, batch).compile().as_text()
        return sum(" tanh(" in line for line in hlo.splitlines())

    assert forwards(keeps=False) == 2 * forwards(keeps=True)


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [("overwritten_microbatch", {"embedding", "blocks"}), ("stale_tied_copy", {"embedding"})],
)
def test_faults_show_in_gradients_alone(fault, wrong):
    errors = errors_of_the_example(fault=fault, schedule="1f1b", devices=2)
    assert {name for name, error in errors.items() if error > 1e-2} == wrong
    assert all(error <= 1e-14 for name, error in errors.items() if name not in wrong)
    with pytest.raises(ExperimentError, match=f"{fault}.*layout.pp = 2 or more"):
        plant(fault, engine="jax-manual", layout=Layout())


def test_a_schedule_for_other_numbers_is_refused():
    _, step, _ = example(schedule="gpipe", devices=2)
    params = {"embedding": np.zeros((WIDTH, HIDDEN)), "blocks": np.zeros((LAYERS, HIDDEN, HIDDEN))}
    batch = dict.fromkeys(("x", "y"), np.zeros((M - 1, B, WIDTH)))
    with pytest.raises(ValueError, match="2 ranks and 8 microbatches, for 2 devices and 7 microbatches"):
        step(params, batch)
