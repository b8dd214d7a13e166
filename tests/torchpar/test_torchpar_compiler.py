"""torchpar.compiler's layouts on four gloo ranks, in float64: placements, against one device."""

from functools import partial

import gpt_steps
import pytest
import torch
from gpt_steps import ADAM, CONFIG, SGD, assert_cut, assert_same, backward, reference
from layouts import TORCH_COMPILER as LAYOUTS
from msgspec.structs import replace
from ranks import on_ranks

from compare.contract.faults import planted
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout
from torchpar import compiler
from torchpar.compiler.compilation import resolve_backend

make_parallel = partial(gpt_steps.make_parallel, compiler.parallelize)
train = partial(gpt_steps.train, compiler.parallelize)
BLOCKS = CONFIG.n_layer
COVERED = ("zero1", "ddp_tp", "fsdp_tp")
"""By SGD, and with a split sequence; what they hold is in test_torchpar_shards.py."""


@pytest.mark.parametrize(
    ("experiment", "names"),
    [(ADAM, [name for name in LAYOUTS if name not in COVERED]), (SGD, ["zero1"])],
    ids=["adamw", "sgd"],
)
@on_ranks
def test_every_layout_equals_one_device(rank: int, experiment: Experiment, names: list[str]) -> None:
    expected = reference(experiment)
    for name in names:
        got, parallel = train(LAYOUTS[name], rank, experiment)
        assert_same(got, expected, name)
        assert_cut(parallel, experiment, LAYOUTS[name], name)


@on_ranks
def test_a_step_is_one_graph_and_equals_one_device(rank: int) -> None:
    """Forward and backward of both passes and steps: torch.compile fails where it would break the graph."""
    for name in ("cp", "fsdp_tp_sp"):
        got, parallel = train(replace(LAYOUTS[name], compile="aot_eager"), rank, ADAM)
        assert_same(got, reference(ADAM), name)
    work = parallel.compiled(is_fused=False)
    assert work["compiled"] == "aot_eager, 1 graph"
    assert (work["forward"]["activations"], work["forward"]["logits"]) == (BLOCKS, 1)


@on_ranks
def test_a_placement_that_is_said_wrongly_shows(rank: int) -> None:
    expected = reference(ADAM, steps=1)["gradients"]
    for fault, name in (
        ("dropped_all_reduce", "ddp"),
        ("sum_for_mean", "ddp"),
        ("missing_norm_psum", "tp_sp"),
        ("dropped_tp_all_reduce", "tp_sp"),
    ):
        with planted(fault, engine="torch-compiler"):
            parallel, mesh = make_parallel(LAYOUTS[name], rank, ADAM)
            backward(parallel, mesh, 0)
        got = parallel.full(parallel.gradients())
        parameter = "transformer.ln_f.weight"
        assert (got[parameter] - expected[parameter]).abs().max() > 1e-3, fault


def test_what_placements_cannot_say_is_refused_by_name(monkeypatch):
    engine = ENGINES["torch-compiler"]
    with pytest.raises(ExperimentError, match=r"torch-compiler has no pipeline \(DTensor has no shift"):
        engine.require(Layout(pp=2, schedule="gpipe", microbatches=2))
    for context, why in (("ring", "no placement for keys that pass by"), ("ulysses", "a gather on a CPU")):
        with pytest.raises(ExperimentError, match=f"layout.context = {context}: .*{why}"):
            engine.require(Layout(cp=2, context=context))
    with pytest.raises(ExperimentError, match="moments are DTensors"):
        engine.require(Layout(offload="optimizer"))
    full = Layout(remat="full", compile="aot_eager")
    for refused in (full, replace(full, dp_replicate=2)):
        with pytest.raises(ExperimentError, match="saves tensors alone"):
            engine.require(refused)
    engine.require(replace(full, compile="none"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"layout.compile = inductor: there is no C\+\+ compiler"):
        resolve_backend(Layout(compile="inductor"), torch.device("cpu"))
    backends = {
        remat: resolve_backend(Layout(remat=remat), torch.device("cuda")) for remat in ("dots", "full")
    }
    assert backends == {"dots": "inductor", "full": "none"}
    assert resolve_backend(Layout(), torch.device("cpu")) == "none"
