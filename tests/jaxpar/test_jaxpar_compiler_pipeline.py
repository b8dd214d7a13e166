"""Pipelines by the compiler: any model against a plain scan; nanoGPT, what it moves and what it keeps."""

import re
from functools import partial
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_steps import ACCUMULATION as A
from jax_steps import size_of, two_steps, worst_errors
from layouts import JAX_COMPILER_PIPELINES as LAYOUTS

from compare.contract.communication import summed
from compare.numerics.parameters import parameter_count, parameter_table
from compare.spec.axes import PP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError, Layout, Model
from jaxpar.compiler.pipeline_parallel import lanes, pipelined
from jaxpar.measure.ledger import communications
from jaxpar.placement import Placement
from jaxpar.problem import Pieces

# Any model ----------------------------------------------------------------------------------------------

WIDTH = 6


def layer(x, w):
    """Not finite at zero, which no idle stage must be given."""
    return jnp.tanh(x @ w) + x / jnp.linalg.norm(x, axis=-1, keepdims=True), None


PIECES = Pieces(
    embed=lambda params, batch: batch["x"] @ params["first"],
    layers=lambda params, x, batch, first: jax.lax.scan(layer, x, params["stack"])[0],
    loss=lambda params, x, batch: jnp.square(x @ params["first"].T - batch["y"]).mean(),
)


def plain(params, batch):
    """All of the batch, without a pipeline."""
    joined = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    return PIECES.loss(params, PIECES.layers(params, PIECES.embed(params, joined), joined, 0), joined)


# stages, microbatches, chunks: as many as stages, more, fewer, and numbers that do not divide
SHAPES = [(1, 2, 1), (2, 1, 1), (2, 4, 1), (2, 5, 1), (4, 3, 1), (4, 6, 1), (2, 4, 2), (2, 2, 3), (4, 8, 2)]


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), SHAPES)
def test_any_model_equals_its_plain_scan(stages, microbatches, chunks):
    mesh = jax.make_mesh((stages,), ("pp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:stages])
    layers = lcm(stages * chunks, 4)
    draw = np.random.default_rng(0).standard_normal
    params = {"first": draw((3, WIDTH)), "stack": draw((layers, WIDTH, WIDTH))}
    batch = {"x": draw((microbatches, 2, 3)), "y": draw((microbatches, 2, 3))}
    value, gradients = jax.value_and_grad(plain)(params, batch)

    place = Placement(shape=params["stack"].shape, dims={PP: 0}, degrees={PP: stages}, chunks=chunks)
    spread = NamedSharding(mesh, P("pp"))
    stored = {"first": params["first"], "stack": jax.device_put(place.pad(params["stack"]), spread)}
    loss = pipelined(PIECES, mesh=mesh, stacked="stack", chunks=chunks)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(stored, batch).compile()
    found, of_stored = compiled(stored, batch)

    np.testing.assert_allclose(found, value, rtol=1e-13)
    np.testing.assert_allclose(of_stored["first"], gradients["first"], rtol=1e-12)
    np.testing.assert_allclose(place.unpad(np.asarray(of_stored["stack"])), gradients["stack"], atol=1e-13)
    rows = summed(communications(compiled.as_text(), mesh.shape))
    ledger = {(row.kind, row.purpose): (row.calls, row.bytes) for row in rows}
    if stages > 1:  # a roll of the stages and one of a lane at every tick, and the lane's first
        rolls = 2 * (microbatches * chunks + stages - 1) + 1
        moved = (rolls, rolls * 8 * 2 * WIDTH)
        assert ledger["permute", "activations"] == ledger["permute", "activation gradients"] == moved
        assert ledger["all_reduce", "gradients"][0] == 1  # of what every stage has, once
        assert len(ledger) <= 4


def test_every_microbatch_enters_and_leaves_once():
    for stages in range(1, 9):
        for microbatches in range(1, 17):
            enters, leaves, counts = lanes(microbatches, stages)
            assert enters.T.ravel()[:microbatches].tolist() == list(range(microbatches))
            assert sorted(leaves[counts]) == list(range(microbatches))
            if microbatches % stages == 0:  # then lanes have rolled all the way round
                assert (np.roll(leaves, -1, axis=1) == enters).all()


def test_chunks_want_microbatches_for_all_stages():
    mesh = jax.make_mesh((2,), ("pp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    loss = pipelined(PIECES, mesh=mesh, stacked="stack", chunks=2)
    with pytest.raises(ValueError, match="3 microbatches for 2 stages"):
        loss({}, {"x": jnp.ones((3, 2, 3))})


# nanoGPT ------------------------------------------------------------------------------------------------

L, B, T, C = 4, 8, 10, 16
MODEL = Model(n_layer=L, n_head=2, n_embd=C, block_size=T, vocab_size=257, bias=True)
N = parameter_count(MODEL)
ENDS = C * (257 + T + 2)  # embeddings and the last norm, which every stage has


run = partial(two_steps, "jax-compiler", model=MODEL, batch_size=B)


def ticks(layout: Layout) -> int:
    return A * layout.microbatches * layout.chunks + layout.pp - 1


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_one_device_and_is_really_split(layout):
    outcome = run(layout)
    errors, resident = worst_errors(outcome.numbers, run(Layout()).numbers), outcome.resident
    assert max(errors.values()) <= 1e-10, errors  # measured: 5e-15, and 2e-13 of weights, which Adam divides

    shards = {"parameters": layout.zero == 3, "gradients": layout.zero >= 2, "optimizer": layout.zero >= 1}
    for name, sharded in shards.items():
        least = 8 * (ENDS + (N - ENDS) / layout.pp) / layout.tp / (layout.dp_shard if sharded else 1)
        least *= 2 if name == "optimizer" else 1
        assert len(set(resident[name])) == 1
        # Above it: what tp repeats (norms, row biases, positions), and padding of the vocabulary.
        assert least <= resident[name][0] <= least * (1.05 if layout.tp > 1 else 1), name


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_moves_along_the_pipeline(layout):
    """Each tick rolls the stages and a lane; the embedding has a gradient of each of its two uses."""
    ledger = run(layout).ledger
    b = B // layout.data_parallel // layout.microbatches
    stream = 8 * b * T * C // (layout.tp if layout.sequence_parallel else 1)
    rolls = 2 * ticks(layout) + 1
    found = {e.purpose: (e.calls, e.bytes) for e in ledger if e.kind == "permute" and e.axis == "pp"}
    assert found == dict.fromkeys(("activations", "activation gradients"), (rolls, rolls * stream))
    ends = 8 * (ENDS + 257 * C) / layout.tp
    if layout.zero != 2:  # there XLA exchanges rows of the embedding's gradient instead
        reduced = size_of(ledger, kind="all_reduce", axis="pp", purpose="gradients")
        assert ends <= reduced <= ends + 8 * (T * C + C + 12)  # what tp repeats, padding, and scalars
    assert not any(e.axis == "?" for e in ledger)
    assert not any(e.kind == "all_to_all" and "pp" in e.axis for e in ledger)


def test_gradients_of_replicas_are_reduced_once_a_step_and_not_at_every_tick():
    layout = LAYOUTS["ddp_pp"]
    whole = run(layout).resident["gradients"][0]
    reduced = size_of(run(layout).ledger, kind="all_reduce", axis="dp_replicate", purpose="gradients")
    assert whole <= reduced <= whole + 64  # and scalars


def test_zero3_gathers_layers_at_every_tick_and_shard_grad_op_once():
    table = parameter_table(MODEL)
    layer = 8 * sum(p.size for p in table if p.name.startswith("blocks.0."))
    biases = 8 * sum(p.size for p in table if p.name.startswith("blocks.0.") and p.name.endswith("bias"))
    gathered = {
        name: size_of(run(LAYOUTS[name]).ledger, axis="dp_shard", purpose="parameters") - 8 * ENDS
        for name in ("fsdp_pp", "shard_grad_op_pp", "fsdp_interleaved")
    }
    assert gathered["shard_grad_op_pp"] == layer * L // 2
    # Without recomputation, backward needs no bias; with it, those that the residual stream is made of.
    assert gathered["fsdp_interleaved"] == ticks(LAYOUTS["fsdp_interleaved"]) * L // 4 * (2 * layer - biases)
    assert gathered["fsdp_pp"] == ticks(LAYOUTS["fsdp_pp"]) * L // 2 * (2 * layer + 8 * C)


@pytest.mark.parametrize("name", ["zero2_pp", "fsdp_pp", "fsdp_interleaved"])
def test_no_parameter_is_kept_for_every_tick(name):
    layout = LAYOUTS[name]
    hlo = run(layout).hlo
    each_tick = rf"f64\[{ticks(layout)},[\d,]*"
    assert re.search(rf"{each_tick}{T},", hlo)  # activations are: the pattern finds what it should
    assert not re.search(rf"{each_tick}\b(?:{C}|{C // 2}),(?:{4 * C}|{2 * C})\]", hlo)


@pytest.mark.parametrize("name", ["zero2_pp", "fsdp_pp", "shard_grad_op_pp"])
def test_gradients_of_layers_accumulate_as_shards(name):
    """The loop over ticks carries those of a stage's two layers: of the MLP's weights, half of each."""
    loops = [
        line.partition(" while(")[0] for line in run(LAYOUTS[name]).hlo.splitlines() if " while(" in line
    ]
    carried = {array for loop in loops for array in re.findall(r"f64\[1,1,2,([\d,]+)\]", loop)}
    assert {f"{C // 2},{4 * C}", f"{2 * C},{C}"} <= carried
    assert not {f"{C},{4 * C}", f"{4 * C},{C}"} & carried


def test_backward_has_no_order_of_its_own():
    for schedule in ("1f1b", "zero_bubble"):
        with pytest.raises(ExperimentError, match=f"{schedule}: .*gpipe, interleaved.*autodiff"):
            ENGINES["jax-compiler"].require(Layout(pp=2, schedule=schedule, microbatches=2))
