"""The ledger of programs for TPUs and GPUs: excerpts of what XLA's compilers made of jax-compiler's step.

`fsdp` on eight devices, 4 layers of width 256, bfloat16, jax 0.10.2: libtpu 0.0.42.1 for v5e:2x4, and
jax-cuda13-plugin 0.10.2 for eight H100.
"""

import importlib.metadata
from pathlib import Path

import jax
import pytest
from msgspec.structs import replace

from compare.contract.chips import Chip, ChipRequest
from compare.contract.communication import Communication, summed
from compare.spec.experiment import Layout
from jaxpar import ahead_of_time
from jaxpar.ahead_of_time import absent_devices, compile_ahead, state_like
from jaxpar.comm.mesh import make_mesh
from jaxpar.measure.ledger import read_ledger
from jaxpar.measure.memory import planned_memory
from jaxpar.programs import compile_program, trace_train
from jaxpar.train import initial_state, make_engine

TEXTS = Path(__file__).parents[1] / "data" / "hlo"
TPU, GPU = ((TEXTS / f"{chip}_fsdp_compiler.txt").read_text() for chip in ("tpu", "gpu"))
SIZES = {"dp_shard": 8}


def facts(row: Communication) -> tuple[object, ...]:
    return row.kind, row.dtype, row.calls, row.bytes, row.is_async, row.overlapped, row.cycles, row.algorithm


def test_tpu_program_is_read():
    ledger = read_ledger(TPU, SIZES)
    assert ledger.problems == []
    beside = ("dot_general", "div", "reduce_sum")
    assert [facts(row) for row in ledger.rows] == [
        # In a loop of four turns, whose count is only in its condition, its body and its first value.
        ("all_reduce", "f32", 4, 4 * 2048, False, (), 0, "SinglePhaseRingSumEmitter"),
        # A chain: three fusions have a copy of one gather.
        ("all_gather", "bf16", 4, 4 * 2 * 256 * 1024, True, beside, 4 * (3634 + 1836 + 4709), ""),
        ("reduce_scatter", "f32", 1, 2 * 4 * 256 * 256, False, (), 0, "AllReduceScatterFusion"),
    ]
    # The collective in the fusion has no metadata: the fusion's count.
    assert ledger.rows[-1].source == "jit(train)/transpose(jvp())/reduce_sum"


def test_gpu_program_is_read():
    ledger = read_ledger(GPU, SIZES)
    assert ledger.problems == []
    weights = 4 * (2 * 256 * 4 + 2 * 3 * 256 * 256 + 2 * 256 * 256 + 2 * 2 * 256 * 1024)
    kernels = ("dot_general", "dot_general", "fusion")
    assert [facts(row) for row in ledger.rows] == [
        ("all_gather", "f32, bf16", 4, weights, False, (), 0, ""),  # "is_sync": one instruction
        ("all_gather", "f32, bf16", 4, weights, True, ("dynamic_slice", "convert_element_type"), 0, ""),
        ("reduce_scatter", "f32", 4, 4 * 2 * 4 * 256, True, kernels, 0, ""),
        ("all_reduce", "bf16", 4, 4 * 2 * 786_432, True, ("add_any",), 0, ""),
    ]


BROKEN = {
    "a loop that counts from data": ("tuple(%copy.168", "tuple(%parameter.1", "has no known trip count"),
    "a loop with another condition": ("direction=LT", "direction=NE", "has no known trip count"),
    "a loop with another counter": ("add(%copy.176", "add(%all-reduce.54", "has no known trip count"),
    "a counter that goes down": ("sunk.1 = s32[] constant(1)", "sunk.1 = s32[] constant(-1)", "trip count"),
    "a chain without a start": ("AsyncCollectiveStart", "AsyncCollectiveOther", "that never starts"),
    "a fusion of another emitter": ("AllReduceScatterFusion", "OtherFusion", "a fusion of an unknown form"),
    "groups in other words": ("replica_groups={{0,1", "replica_groups=some{{0,1", "cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_unknown_form_is_a_problem_and_never_a_guess(name):
    old, new, words = BROKEN[name]
    assert old in TPU
    ledger = read_ledger(TPU.replace(old, new), SIZES)
    assert {words in problem for problem in ledger.problems} == {True}
    counted = {row.kind: row.calls for row in ledger.rows}
    if "trip count" in words:
        assert counted == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}
    else:
        missing = "all_gather" if "starts" in words else "reduce_scatter"
        assert missing not in counted


def test_counter_may_start_anywhere_in_larger_steps():
    text = TPU.replace("constant(0)", "constant(1)").replace("constant(4)", "constant(10)")
    text = text.replace("sunk.1 = s32[] constant(1)", "sunk.1 = s32[] constant(3)")
    ledger = read_ledger(text, SIZES)
    assert ledger.problems == []
    assert [row.calls for row in ledger.rows] == [3, 3, 1]  # 1, 4, 7


ASYNC = """HloModule m, num_partitions=8

%wrapped (q: f32[8]) -> f32[1] {
  ROOT %r = f32[1]{0} reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}
}

ENTRY %main (p: f32[8]) -> f32[1] {
  %s = ((f32[8]), f32[1], u32[]) async-start(%p), calls=%wrapped
  %k = f32[8]{0} fusion(%p), metadata={op_name="jit(f)/dot_general"}
  ROOT %x = f32[1]{0} async-done(%s)
}
"""


def test_body_of_async_start_runs_overlapped_what_follows():
    (row,) = read_ledger(ASYNC, SIZES).rows
    assert facts(row) == ("reduce_scatter", "f32", 1, 32, True, ("dot_general",), 0, "")


@pytest.fixture
def request_of_tiny(tiny, tmp_path, monkeypatch) -> ChipRequest:
    """A request for four devices of the CPU, which this process has already."""
    monkeypatch.setattr(ahead_of_time, "join_devices", lambda *_, **__: None)
    experiment = replace(tiny, layout=Layout(dp_shard=4, zero=3))
    chip = Chip(name="cpu", compiler="cpu")
    return ChipRequest(engine="jax-manual", experiment=experiment, chip=chip, cache_dir=str(tmp_path))


def test_program_of_shapes_is_that_of_a_run(request_of_tiny):
    found, again = compile_ahead(request_of_tiny), compile_ahead(request_of_tiny)
    experiment = request_of_tiny.experiment
    engine = make_engine("jax-manual", experiment, make_mesh(experiment.layout, platform="cpu"))
    state = initial_state(engine)
    like = state_like(engine)
    for shape, array in zip(
        *map(jax.tree.leaves, ((like.params, like.opt_state), (state.params, state.opt_state))), strict=True
    ):
        assert (shape.shape, shape.dtype, shape.sharding) == (array.shape, array.dtype, array.sharding)
    step = compile_program(engine, trace_train(engine, state))
    assert summed(found.ledger.rows) == summed(read_ledger(step.as_text() or "", engine.mesh.shape).rows)
    assert found.peak_bytes == planned_memory(step) > found.state_bytes
    assert (found.is_cached, again.is_cached) == (False, True)
    assert replace(again, is_cached=False) == found
    other = replace(experiment, optimizer=replace(experiment.optimizer, beta1=0.5))
    assert not compile_ahead(replace(request_of_tiny, experiment=other)).is_cached


@pytest.mark.parametrize(("compiler", "extra"), [("tpu", "tpu"), ("cuda", "gpu-compiler")])
def test_missing_compiler_is_named(compiler, extra, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(()))
    with pytest.raises(ImportError, match=rf"is not installed: pip install 'shardpair\[{extra}\]'"):
        absent_devices(Chip(name="x", compiler=compiler))
