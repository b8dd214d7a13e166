"""Pipelines by hand in JAX: a small model of its own in every schedule, and the GPT with every other axis."""

import inspect
import textwrap
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from compare.contract.data import open_corpus
from compare.contract.engines import ENGINES
from compare.contract.experiment import (
    Data,
    Experiment,
    ExperimentError,
    Layout,
    Model,
    Optimizer,
    Precision,
    Train,
)
from compare.contract.parameters import parameter_count
from compare.contract.schedules import make_schedule
from jaxpar import weights
from jaxpar.collectives import per_device
from jaxpar.faults import plant
from jaxpar.ledger import communications
from jaxpar.manual import pipeline_parallel
from jaxpar.manual.ticks import lock_step
from jaxpar.measure import resident_bytes
from jaxpar.mesh import make_mesh
from jaxpar.placement import LAYER, place
from jaxpar.plan import Pieces
from jaxpar.remat import resolve_remat
from jaxpar.train import compile_step, device_scalars, gradients_at_rest, prepare

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)


# ---- Any model in pieces: the example of the module's docstring, run as it stands.

M, B, WIDTH, HIDDEN, LAYERS = 8, 3, 5, 4, 8
PUBLIC = ("own_copies", "pipelined_gradients", "sum_tied_gradients")


def example(*, schedule: str, devices: int, chunks: int = 1):
    """The docstring's pieces and its step, for a schedule; and where its parameters live."""
    place_leaf = partial(place, split={}, pp=devices, chunks=chunks)
    placements = {
        "embedding": place_leaf((WIDTH, HIDDEN), ("embed", "hidden")),
        "blocks": place_leaf((LAYERS, HIDDEN, HIDDEN), (LAYER, "in", "out")),
    }
    text = inspect.getdoc(pipeline_parallel).partition("For any model in pieces")[2].partition(":\n\n")[2]
    code = textwrap.dedent(text.partition("\n\nSources")[0])
    assert 'make_schedule("1f1b", ranks=4, microbatches=8)' in code
    code = code.replace(
        '"1f1b", ranks=4, microbatches=8', f'"{schedule}", ranks={devices}, microbatches={M}, chunks={chunks}'
    )
    mesh = Mesh(np.array(jax.devices()[:devices]), ("pp",))
    names = {
        **dict(jax=jax, jnp=jnp, lax=lax, P=P, Pieces=Pieces, mesh=mesh, placements=placements),
        **dict(make_schedule=make_schedule, lock_step=lock_step, per_device=per_device),
        **{name: getattr(pipeline_parallel, name) for name in PUBLIC},
    }
    exec(code, names)
    return names["pieces"], names["step"], placements


def errors_of_the_example(*, fault: str = "", **shape) -> dict[str, float]:
    """Largest errors of its loss and gradients, against autodiff of the whole model."""
    with plant(fault, engine="jax-manual", layout=Layout(pp=2)):
        pieces, step, placements = example(**shape)
        draw = np.random.default_rng(0).standard_normal
        params = {"embedding": draw((WIDTH, HIDDEN)), "blocks": draw((LAYERS, HIDDEN, HIDDEN))}
        batch = {"x": draw((M, B, WIDTH)), "y": draw((M, B, WIDTH))}
        value, gradients = step({name: p.pad(params[name]) for name, p in placements.items()}, batch)

    def whole(params, batch):
        one = jax.tree.map(np.concatenate, batch)
        return pieces.loss(params, pieces.layers(params, pieces.embed(params, one)), one)

    expected, of_whole = jax.value_and_grad(whole)(params, batch)
    errors = {"loss": float(abs(value - expected))}
    for name, p in placements.items():
        errors[name] = float(np.abs(p.strip(np.asarray(gradients[name])) - of_whole[name]).max())
    return errors


@pytest.mark.parametrize(
    ("schedule", "devices", "chunks"),
    [("gpipe", 4, 1), ("1f1b", 4, 1), ("1f1b", 2, 1), ("interleaved", 2, 2), ("interleaved", 2, 4)],
)
def test_the_example_of_the_docstring_equals_autodiff_of_the_whole(schedule, devices, chunks):
    errors = errors_of_the_example(schedule=schedule, devices=devices, chunks=chunks)
    assert max(errors.values()) <= 1e-14, errors


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


# ---- The GPT: numbers, bytes at rest, and what is communicated.

L, A, EMBED = 4, 2, 16
MODEL = Model(n_layer=L, n_head=2, n_embd=EMBED, block_size=10, vocab_size=257, bias=True)
REST = EMBED * (257 + 10 + 2)
"""Numbers in what pp does not split: tokens, positions, the last norm."""
BLOCKS = parameter_count(MODEL) - REST
LAYOUTS = {
    "zero2_gpipe": Layout(pp=2, schedule="gpipe", dp_shard=2, zero=2, microbatches=2),
    "tp_sp": Layout(pp=2, tp=2, sequence_parallel=True, microbatches=2),
    "shard_grad_op": Layout(pp=2, dp_shard=2, zero=3, reshard_after_forward=False, microbatches=2),
    "fsdp_interleaved": Layout(pp=2, schedule="interleaved", chunks=2, dp_shard=2, zero=3, microbatches=2),
}


@cache
def run(layout: Layout):
    """Two steps of a layout. Returns numbers by name, bytes at rest, and the ledger."""
    spec = Experiment(
        model=MODEL,
        data=Data(source="synthetic"),
        optimizer=Optimizer(warmup_iters=0, grad_clip=0.1),
        train=Train(batch_size=8, gradient_accumulation_steps=A),
        precision=Precision(dtype="float64"),
        layout=layout,
    )
    mesh = make_mesh(layout, platform="cpu")
    plan, state = prepare("jax-manual", spec, mesh=mesh, remat=resolve_remat(layout, engine="jax-manual"))
    step = compile_step(plan, state, spec, with_gradients=True)
    found = {}
    for index in range(2):
        inputs, targets = open_corpus(spec).batch(spec, index)
        batch = jax.device_put({"inputs": inputs, "targets": targets}, plan.batch)
        state.params, state.opt_state, metrics, gradients = step(
            state.params, state.opt_state, batch, device_scalars(spec, index)
        )
        found |= {f"{index} {name}": np.asarray(value) for name, value in metrics.items()}
        for kind, tree in {"gradient": gradients, "weight": state.params}.items():
            named = weights.to_canonical(plan.strip(tree), MODEL)
            found |= {f"{index} {kind} {name}": tensor for name, tensor in named.items()}
    devices = list(mesh.devices.flat)
    trees = {
        "parameters": state.params,
        "gradients": gradients_at_rest(plan, state),
        "optimizer": state.opt_state,
    }
    resident = {name: resident_bytes(tree, devices) for name, tree in trees.items()}
    assert_copies_are_equal(state.params)
    return found, resident, communications(step.as_text(), mesh.shape)


def assert_copies_are_equal(tree) -> None:
    """Bit for bit, wherever a leaf has several devices for one part: the embedding's copies among them."""
    for leaf in jax.tree.leaves(tree):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            np.testing.assert_array_equal(data, first.setdefault(str(shard.index), data))


def worst(found: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest relative error of each kind of number: loss, grad_norm, gradient, weight."""
    errors: dict[str, float] = {}
    for name, expected in run(Layout())[0].items():
        error = np.abs(found[name] - expected).max() / np.abs(expected).max()
        kind = " ".join(name.split()[:2])
        errors[kind] = max(errors.get(kind, 0.0), float(error))
    return errors


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_one_device_and_is_really_split(layout):
    found, resident, _ = run(layout)
    errors = worst(found)
    assert max(errors.values()) <= 1e-10, errors  # measured: 1e-15, and 2e-13 of weights, which Adam divides

    # Closed form: layers are divided by pp, and all by the degrees that split it besides. Above it: what is
    # repeated along tp, and padding, of which these odd sizes have much.
    shards = {"parameters": layout.zero == 3, "gradients": layout.zero >= 2, "optimizer": layout.zero >= 1}
    for name, sharded in shards.items():
        copies = 2 if name == "optimizer" else 1
        least = 8 * copies * (BLOCKS / layout.pp + REST) / layout.tp / (layout.dp_shard if sharded else 1)
        assert len(set(resident[name])) == 1
        assert least <= resident[name][0] <= 1.15 * least, name


def size_of(ledger, **fields: str) -> int:
    return sum(e.bytes for e in ledger if all(getattr(e, name) == value for name, value in fields.items()))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_messages_and_tied_gradients_are_what_the_schedule_says(layout):
    _, _, ledger = run(layout)
    ticks = lock_step(
        make_schedule(
            layout.schedule, ranks=layout.pp, microbatches=A * layout.microbatches, chunks=layout.chunks
        )
    )
    sequences = 8 // layout.data_parallel // layout.microbatches
    stream = 8 * sequences * 10 * EMBED // (layout.tp if layout.sequence_parallel else 1)
    permutes = {e.purpose: (e.calls, e.bytes) for e in ledger if e.kind == "permute"}
    activations, gradients = (int(x.sum()) for x in (ticks.sends_activations, ticks.sends_gradients))
    assert permutes == {
        "activations": (activations, activations * stream),
        "activation gradients": (gradients, gradients * stream),
    }
    tied = size_of(ledger, axis="pp", purpose="tied gradients")
    whole = 8 * REST / layout.dp_shard  # they are scattered before they are summed
    assert whole / layout.tp <= tied <= 1.15 * whole
    # Nothing else goes along pp: no parameter, and no gradient of a layer.
    assert size_of(ledger, axis="pp") - size_of(ledger, axis="pp", purpose="metrics") == tied + sum(
        size for _, size in permutes.values()
    )


def test_what_shards_is_reduced_once_a_microbatch():
    """Layers and ends for each microbatch; under zero 3 what is in no layer is gathered once a step."""
    m, layers = A * 2, 8 * BLOCKS / 2
    # Tokens from both ends, positions from the first, the norm from the last.
    ends = 8 * EMBED * (2 * 257 + 10 + 2)
    names = ("zero2_gpipe", "fsdp_interleaved", "shard_grad_op")
    zero2, zero3, kept = (run(LAYOUTS[name])[2] for name in names)
    for ledger in (zero2, zero3, kept):
        scattered = size_of(ledger, kind="reduce_scatter", axis="dp_shard")
        assert scattered == pytest.approx(m * (layers + ends), rel=0.05)
    assert size_of(zero2, kind="all_gather", axis="dp_shard") == 8 * REST + layers  # after the update
    assert size_of(kept, kind="all_gather", axis="dp_shard") == 8 * REST + layers  # once, before the ticks
    # Once for the forward, once for the backward: a stage is one layer here, and XLA sees that gathering it
    # for the forward anew is gathering it for the gradients. Of more layers it would keep but one.
    gathered = size_of(zero3, kind="all_gather", axis="dp_shard")
    assert gathered == pytest.approx(8 * REST + 2 * m * layers, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=2, remat="dots"), r"layout.remat = dots .* choose layout.remat = full or auto"),
        (Layout(pp=2, remat="none"), r"layout.remat = none .* choose layout.remat = full or auto"),
        (Layout(pp=2, schedule="zero_bubble"), "jax-manual has gpipe, 1f1b, interleaved"),
    ],
)
def test_refused_by_name(layout, message):
    with pytest.raises(ExperimentError, match=message):
        ENGINES["jax-manual"].require(layout)


def test_what_is_recorded_as_recomputed_is_what_a_pipeline_does():
    assert resolve_remat(Layout(pp=2), engine="jax-manual") == "full"
    assert resolve_remat(Layout(), engine="jax-manual") == "dots"
    assert resolve_remat(Layout(pp=2, remat="full"), engine="jax-manual") == "full"
