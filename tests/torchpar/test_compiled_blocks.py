"""Blocks that torch.compile compiles by themselves, on four gloo ranks, in float64, against one device.

The backend is aot_eager: it traces as inductor does, and needs no C++ compiler.
"""

import sys
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from compare.contract.communication import summed
from compare.spec.experiment import Experiment, Layout, edited
from tests.support.gpt_steps import ADAM, assert_same, backward, make_parallel, reference, train
from tests.support.ranks import on_ranks
from tests.support.torch_runs import trained
from torchpar import compilation, compiler, manual
from torchpar.measure.ledger import LedgerSink
from torchpar.measure.source_lines import line_of
from torchpar.measure.watch import Watch
from torchpar.measure.work import WorkSink
from torchpar.train import MAKE_ENGINE

LAYOUTS = {
    "torch-manual": {
        "ddp": Layout(dp_replicate=4),
        "zero3": Layout(dp_shard=4, zero=3, remat="full"),
        "fsdp_tp_sp": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True, remat="dots"),
        "cp_tp": Layout(cp=2, tp=2, zigzag=True),
        "ulysses": Layout(cp=2, dp_replicate=2, context="ulysses"),
    },
    "torch-library": {
        "ddp_cp": Layout(dp_replicate=2, cp=2, zigzag=True),
        "fsdp_tp_sp": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True, remat="dots"),
        "zero3": Layout(dp_shard=4, zero=3, remat="full"),
    },
}
CASES = [(engine, name) for engine, layouts in LAYOUTS.items() for name in layouts]


@pytest.mark.parametrize(("engine", "name"), CASES)
@on_ranks
def test_compiled_blocks_equal_one_device(rank: int, engine: str, name: str) -> None:
    torch._dynamo.reset()
    compilation.BACKEND_OF_BLOCKS = "aot_eager"
    layout = replace(LAYOUTS[engine][name], compile="block")
    got, _ = train(MAKE_ENGINE[engine], layout, rank, ADAM)
    assert_same(got, reference(ADAM), name)


@on_ranks
def test_compiled_blocks_are_observed(rank: int) -> None:
    """The watch counts the program's messages where they are sent, and its operators in the graph."""
    torch._dynamo.reset()
    compilation.BACKEND_OF_BLOCKS = "aot_eager"
    layout = Layout(tp=4, sequence_parallel=True, remat="dots")  # an axis with the group of the world
    plain, compiled = ({}, {})
    for compile, found in (("none", plain), ("block", compiled)):
        parallel, mesh = make_parallel(manual.make_engine, replace(layout, compile=compile), rank, ADAM)
        backward(parallel, mesh, 0)
        parallel.optimizer.zero_grad(set_to_none=True)
        axes = {axis.group.group_name: axis.name for axis in mesh.axes.values() if axis.group}
        ledger, work = LedgerSink(axes), WorkSink(parallel.module)
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True), Watch(ledger, work):
            backward(parallel, mesh, 1)
        rows, dispatched, own, problems = ledger.result()
        assert (dispatched, problems) == (own, [])
        found["sent"] = {(row.kind, row.axis, row.purpose): row.bytes for row in summed(rows)}
        result = work.result()
        found["work"] = parallel.compiled(result) if parallel.compiled else result
    assert compiled["sent"] == plain["sent"]
    work, seen = compiled["work"], plain["work"]
    assert (work.compiled, seen.compiled) == ("block, aot_eager, 1 graph", "")
    assert (work.forward, work.again, work.logits_positions) == (
        seen.forward,
        seen.again,
        seen.logits_positions,
    )


@pytest.mark.parametrize(
    ("engine", "compile", "dropout", "compiled"),
    [
        ("torch-manual", "block", 0.1, "block, aot_eager, {} graphs"),  # a mask depends on its layer
        ("nanogpt-loop", "aot_eager", 0.0, "aot_eager, 1 graph"),
    ],
)
def test_compiled_run_equals_plain_run(
    tmp_path, monkeypatch, tiny: Experiment, engine, compile, dropout, compiled
):
    """In bfloat16, on one device: the same losses, from as few programs as possible."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation, "BACKEND_OF_BLOCKS", "aot_eager")
    mixed = edited(tiny, {"precision": {"dtype": "bfloat16"}, "model": {"dropout": dropout}})
    records = [
        trained(tmp_path / how, edited(mixed, {"layout": {"compile": how}}), engine)
        for how in ("none", compile)
    ]
    plain, program = ([step.loss for step in record.steps] for record in records)
    # A program may keep float32 between operations that round to 16 bits without it.
    assert plain == pytest.approx(program, rel=1e-5)
    assert records[1].work.compiled == compiled.format(tiny.model.n_layer)
    assert records[1].work.forward == records[0].work.forward
    assert (records[0].manifest.compile_s, records[0].work.compiled) == (0, "")
    assert records[1].manifest.compile_s > 0


@on_ranks
def test_inductor_buckets_messages(rank: int) -> None:
    """The graph of a forward before and after inductor's passes; nothing is compiled or sent."""
    import torch._inductor.compile_fx as inductor  # takes seconds

    torch._dynamo.reset()
    passes, gathers = inductor.post_grad_passes, []

    def count_gathers(graph: torch.fx.GraphModule, is_inference: bool) -> None:
        def note() -> None:
            gathers.append(sum("all_gather_into" in str(node.target) for node in graph.graph.nodes))

        note()
        passes(graph, is_inference)
        note()
        raise StopIteration

    layout = Layout(dp_shard=4, zero=3, compile="inductor")
    for size in (25.0, 0.003):
        with (
            patch.object(inductor, "post_grad_passes", count_gathers),
            patch("shutil.which", return_value="c++"),
        ):
            parallel, _ = make_parallel(compiler.make_engine, replace(layout, bucket_mb=size), rank, ADAM)
            ids = torch.zeros(1, 8, dtype=torch.int64)
            with pytest.raises(Exception, match="StopIteration"):
                parallel.module(ids, ids)
    assert gathers[:2] == [24, 1]
    assert gathers[2] == 24 > gathers[3] > 1


def test_line_of_a_message_is_not_in_a_generated_program(monkeypatch):
    """Programs differ by rank, and the ledger joins the rows of ranks by their lines."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/generated")
    program: dict = {}
    exec(compile("def call(look): return look()", "/generated/ab/cab.py", "exec"), program)
    line = program["call"](lambda: line_of(sys._getframe(1)))
    assert line.startswith("test_compiled_blocks.py:")
