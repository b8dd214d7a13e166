"""Sharded layouts against one device, in float64: numbers, shards and communication.

The sizes of the model are not divisible. Two microbatches are compiled once for each engine and layout.
"""

import re

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from compare.checkpoint.description import WEIGHTS, folder_name
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Saver
from compare.numerics.parameters import parameter_table
from compare.numerics.shards import Shard
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import lock_step
from compare.spec.experiment import Layout, Model
from compare.spec.xla import xla_options
from jaxpar.checkpoint import local_shards, state_parts
from jaxpar.comm.mesh import make_mesh
from jaxpar.measure.hlo_collectives import collectives
from jaxpar.train import make_engine, restore_state
from tests.support.assembly import assemble, cut
from tests.support.checkpoints import STEP, UPDATES, assert_is_random, describe, random_state, write_random
from tests.support.jax_steps import ACCUMULATION as A
from tests.support.jax_steps import (
    MODEL,
    REST,
    B,
    C,
    L,
    N,
    Outcome,
    T,
    experiment_of,
    size_of,
    two_steps,
    worst_errors,
)

GPIPE = {"schedule": "gpipe", "microbatches": 4}
INTERLEAVED = Layout(pp=2, dp_shard=2, zero=3, schedule="interleaved", chunks=2, microbatches=2, remat="none")

LAYOUTS = {
    "jax-compiler zero2_tp": Layout(dp_shard=2, zero=2, tp=2),
    "jax-compiler ddp_tp": Layout(dp_replicate=2, tp=2, remat="full"),
    "jax-compiler fsdp_tp_sp": Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True),
    "jax-compiler ddp_pp": Layout(pp=2, dp_replicate=2, **GPIPE, remat="full"),
    "jax-compiler zero2_pp": Layout(pp=2, dp_shard=2, zero=2, **GPIPE),
    "jax-compiler shard_grad_op_pp": Layout(pp=2, dp_shard=2, zero=3, reshard_after_forward=False, **GPIPE),
    "jax-compiler fsdp_interleaved": INTERLEAVED,
    "jax-explicit ddp_tp": Layout(dp_replicate=2, tp=2, remat="full"),
    "jax-explicit hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3, remat="none"),
    "jax-explicit tp_sp_pp": Layout(pp=2, tp=2, sequence_parallel=True, **GPIPE),
    "jax-manual zero1": Layout(dp_shard=4, zero=1),
    "jax-manual ddp_tp": Layout(dp_replicate=2, tp=2, remat="full"),
    "jax-manual hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3, remat="none"),
    "jax-manual tp_sp": Layout(tp=2, sequence_parallel=True, remat="none"),
    "jax-manual zero2_gpipe": Layout(pp=2, schedule="gpipe", dp_shard=2, zero=2, microbatches=2),
    "jax-manual shard_grad_op_pp": Layout(
        pp=2, dp_shard=2, zero=3, reshard_after_forward=False, microbatches=2
    ),
    "jax-manual fsdp_interleaved": INTERLEAVED,
}
"""Layouts of jaxpar's engines: each strategy and each remat at least once."""
ENGINES = ("jax-compiler", "jax-explicit", "jax-manual")
BLOCKS = N - REST


@pytest.mark.parametrize("engine", ENGINES)
def test_xla_has_the_tuned_options(engine):
    """XLA knows each option, and the engine keeps its own."""
    layout = Layout(dp_replicate=2, xla="tuned")
    plain, tuned = (
        make_engine(engine, experiment_of(of), make_mesh(of, platform="cpu")).compiler_options
        for of in (replace(layout, xla="plain"), layout)
    )
    assert tuned == plain | xla_options(layout)
    assert ("xla_disable_hlo_passes" in tuned) == (engine == "jax-manual")
    jax.jit(lambda x: x).lower(1.0).compile(compiler_options=tuned)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_device(name):
    engine, layout = name.split()[0], LAYOUTS[name]
    outcome = two_steps(engine, layout)
    errors = worst_errors(outcome)
    assert max(errors.values()) <= 1e-10, errors  # measured: 1e-15, and 1e-12 of weights, which Adam divides
    _is_split(outcome, layout)
    _shards_are_slices(outcome, layout)
    assert not any(entry.axis == "?" for entry in outcome.ledger)
    # Under zero 2 XLA may exchange rows of the embedding's gradient along dp_shard: its own choice.
    assert not any(e.kind == "all_to_all" and ("tp" in e.axis or "pp" in e.axis) for e in outcome.ledger)
    if engine == "jax-manual":  # every collective has a purpose, so the ledger infers none
        found = collectives(outcome.hlo, layout.axes)
        assert [c for c in found if max(map(len, c.groups)) > 1 and not c.purpose] == []
        # XLA on a CPU would copy what it reduces over an axis of one device.
        assert layout.pp > 1 or all(max(map(len, c.groups)) > 1 for c in found)
    if layout.pp > 1:
        _moves_along_the_pipeline(engine, outcome, layout)


def _is_split(outcome: Outcome, layout: Layout) -> None:
    """Each kind of state is divided by the degrees that split it.

    It may be larger by the parameters that tp repeats (norms, row biases, positions), and by padding.
    """
    shards = {"parameters": layout.zero == 3, "gradients": layout.zero >= 2, "optimizer": layout.zero >= 1}
    for name, sharded in shards.items():
        least = 8 * (BLOCKS / layout.pp + REST) / layout.tp / (layout.dp_shard if sharded else 1)
        least *= 2 if name == "optimizer" else 1
        assert len(set(outcome.resident[name])) == 1
        assert least <= outcome.resident[name][0] <= 1.15 * least, name


def _shards_are_slices(outcome: Outcome, layout: Layout) -> None:
    """Every shard equals its slice of the full tensor. One of equal copies is saved."""
    for tree, expected in (
        (outcome.state.params, "1 weight"),
        *((tree, "") for tree in outcome.state.opt_state.values()),
    ):
        parts: dict[str, list[tuple[Shard, np.ndarray]]] = {row.name: [] for row in parameter_table(MODEL)}
        for shard, array in local_shards(tree, outcome.engine):
            parts[shard.name].append((shard, array))
        assert {shard.device for some in parts.values() for shard, _ in some} == set(range(layout.devices))
        for name, some in parts.items():
            once = [(shard, array) for shard, array in some if not shard.replica]
            shape = next(row.shape for row in parameter_table(MODEL) if row.name == name)
            tensor = assemble(shape, once)
            assert sum(array.size for _, array in once) == tensor.size, name
            if expected:
                np.testing.assert_array_equal(tensor, outcome.numbers[f"{expected} {name}"])
            for shard, array in some:
                np.testing.assert_array_equal(array, cut(tensor, shard), err_msg=str(shard))


def _moves_along_the_pipeline(engine: str, outcome: Outcome, layout: Layout) -> None:
    """Messages between stages at the ticks of the schedule; gradients of tied parameters once a step."""
    stream = 8 * (B // layout.data_parallel // layout.microbatches) * T * C
    stream //= layout.tp if layout.sequence_parallel else 1
    if engine == "jax-manual":
        schedule = make_schedule(
            layout.schedule, ranks=layout.pp, microbatches=A * layout.microbatches, chunks=layout.chunks
        )
        ticks = lock_step(schedule)
        calls = int(ticks.sends_activations.sum()), int(ticks.sends_gradients.sum())
        tied = size_of(outcome.ledger, kind="all_reduce", axis="pp", purpose="tied gradients")
        least = 8 * REST / layout.tp / (layout.dp_shard if layout.zero >= 1 else 1)
        assert least <= tied <= 1.15 * least
        scalars = [size_of(outcome.ledger, axis="pp", purpose=purpose) for purpose in ("loss", "norm")]
        moved = size_of(outcome.ledger, kind="permute", axis="pp")
        assert size_of(outcome.ledger, axis="pp") == tied + moved + sum(scalars)
        assert sum(scalars) <= 2 * 8
    else:  # each tick rolls the stages and a slot, idle or not
        calls = (2 * _ticks(layout) + 1,) * 2
    found = {e.purpose: (e.calls, e.bytes) for e in outcome.ledger if e.kind == "permute" and e.axis == "pp"}
    named = zip(("activations", "activation gradients"), calls, strict=True)
    if engine != "jax-explicit":
        assert found == {purpose: (count, count * stream) for purpose, count in named}
    assert min(count for count, _ in found.values()) > 0


def _ticks(layout: Layout) -> int:
    """Ticks of a pipeline whose backward autodiff derives."""
    return A * layout.microbatches * layout.chunks + layout.pp - 1


SAVED = (
    *("jax-compiler fsdp_tp_sp", "jax-compiler zero2_pp", "jax-explicit tp_sp_pp", "jax-manual hsdp"),
    *("jax-manual zero1", "jax-manual fsdp_interleaved"),
)


@pytest.mark.parametrize("name", SAVED)
def test_state_is_restored_and_saved(tmp_path, name):
    """Four devices divide few sizes of this model, so most shards are padded."""
    model = Model(n_layer=4, n_head=2, n_embd=6, block_size=10, vocab_size=13, bias=True)
    layout = LAYOUTS[name]
    experiment = experiment_of(layout, model=model)
    reader = CheckpointReader(write_random(tmp_path, experiment))
    engine = make_engine(name.split()[0], experiment, make_mesh(layout, platform="cpu"))
    state = restore_state(engine, reader)
    assert (state.step, state.updates) == (STEP, UPDATES)
    whole = random_state(experiment)
    for group, tree in {WEIGHTS: state.params, **state.opt_state}.items():
        for shard, array in local_shards(tree, engine):
            np.testing.assert_array_equal(array, cut(whole[group, shard.name], shard), err_msg=str(shard))
    saver = Saver(tmp_path / "taken", range(layout.devices), of=layout.devices, keep=1)
    saver.save(describe(experiment), state_parts(engine, state))
    saver.finish()
    assert_is_random(tmp_path / "taken" / folder_name(STEP), experiment)


@pytest.mark.parametrize("engine", ENGINES)
def test_zero3_gathers_again_in_backward(engine):
    once, blocks = 8 * (A * BLOCKS + REST), 8 * A * BLOCKS
    biases = 8 * A * 11 * C * L  # backward needs the biases of the residual stream alone
    gathers = LAYOUTS.get(f"{engine} hsdp", Layout(dp_shard=2, zero=3))
    keeps = Layout(dp_shard=2, zero=3, reshard_after_forward=False)
    again, kept = (
        size_of(two_steps(engine, layout).ledger, axis="dp_shard", purpose="parameters")
        for layout in (gathers, keeps)
    )
    # XLA gathers parameters outside the blocks once a step, because they do not change.
    assert once <= kept <= 1.02 * once
    assert kept + blocks - biases <= again <= kept + blocks


@pytest.mark.parametrize("name", ["zero2_pp", "fsdp_interleaved", "shard_grad_op_pp"])
def test_pipeline_keeps_gradients_as_shards(name):
    layout = LAYOUTS[f"jax-compiler {name}"]
    hlo = two_steps("jax-compiler", layout).hlo
    if name != "shard_grad_op_pp":
        each_tick = rf"f64\[{_ticks(layout)},[\d,]*"
        assert re.search(rf"{each_tick}{T},", hlo)  # the pattern matches activations
        assert not re.search(rf"{each_tick}\b(?:{C}|{C // 2}),(?:{4 * C}|{2 * C})\]", hlo)
    if name != "fsdp_interleaved":  # the loop carries half of each gradient of a stage's two layers
        loops = [line.partition(" while(")[0] for line in hlo.splitlines() if " while(" in line]
        carried = {array for loop in loops for array in re.findall(r"f64\[1,1,2,([\d,]+)\]", loop)}
        assert {f"{C // 2},{4 * C}", f"{2 * C},{C}"} <= carried
        assert not {f"{C},{4 * C}", f"{4 * C},{C}"} & carried


def test_residuals_exclude_parameters():
    """Backward does not run a kept forward again, and no slot stores the weights of the MLP."""

    def softmaxes(remat: str) -> int:
        outcome = two_steps("jax-manual", Layout(pp=2, microbatches=2, remat=remat))
        slots = outcome.engine.ticks.kept_slots
        assert (slots > 0) == (remat == "none")
        assert f"f64[{slots},2,{C},{4 * C}]" not in outcome.hlo
        assert (f"f64[{slots},2,{B // 2},{T},{C}]" in outcome.hlo) == (slots > 0)
        return outcome.hlo.count(" exponential(")

    assert softmaxes("none") < softmaxes("full")
