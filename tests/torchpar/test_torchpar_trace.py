"""Traces of torchpar's engines on four gloo ranks: every place equals one device, and mistakes are named."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from compare.contract.record import read_tensors
from compare.contract.request import Request, Rung
from compare.contract.trace import FORWARD, read_trace
from compare.judge.trace import Difference, Trace, first_difference
from compare.side.recording import Progress
from compare.spec.experiment import Data, Experiment, Layout, Precision, Train
from tests.support.gpt_steps import CONFIG, batches, make_parallel
from tests.support.layouts import TORCH_SHARED, TORCH_ZERO
from tests.support.ranks import on_ranks
from tests.support.torch_runs import trained
from torchpar.measure import trace
from torchpar.measure.trace import Tracer
from torchpar.mlp import Balance
from torchpar.run import Run
from torchpar.train import MAKE_ENGINE, forward_backward

EXPERIMENT = Experiment(
    model=CONFIG,
    train=Train(batch_size=4, gradient_accumulation_steps=2),
    precision=Precision(dtype="float64"),
)
WITH_EXPERTS = {"n_experts": 4, "bias": False}
DEEP = {"n_layer": 4}
GROUPED = {"n_kv_head": 2, "position": "rope"}
RING = Layout(cp=4, context="ring", zigzag=True)
EP = Layout(dp_shard=4, ep=2, zero=1)
TP_SP = TORCH_SHARED["tp_sp"]
CASES = [
    ("torch-manual", Layout(dp_replicate=4), {}),
    ("torch-manual", TORCH_ZERO["zero3_remat"], {}),
    ("torch-manual", TP_SP, GROUPED),
    ("torch-manual", RING, {}),
    ("torch-manual", Layout(cp=2, tp=2, context="ulysses"), {}),
    ("torch-manual", EP, WITH_EXPERTS),
    ("torch-manual", replace(TP_SP, remat="dots"), WITH_EXPERTS),
    ("torch-manual", TORCH_SHARED["interleaved"], DEEP),
    ("torch-manual", TORCH_SHARED["tp_sp_pp"], {}),
    ("torch-manual", Layout(pp=2, dp_replicate=2, schedule="zero_bubble", microbatches=2), {}),
    ("torch-library", TORCH_ZERO["shard_grad_op"], {}),
    ("torch-library", Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True), GROUPED),
    ("torch-library", Layout(dp_replicate=2, cp=2, zigzag=True), {}),
    ("torch-library", replace(EP, zero=3), WITH_EXPERTS),
    ("torch-library", TORCH_SHARED["interleaved"], DEEP),
    ("torch-library", Layout(pp=2, dp_shard=2, zero=3, schedule="zero_bubble", microbatches=2), {}),
    ("torch-compiler", Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True), {}),
    ("torch-compiler", Layout(cp=2, tp=2, zigzag=True), GROUPED),
    ("torch-compiler", EP, WITH_EXPERTS),
    ("torch-compiler", TP_SP, WITH_EXPERTS),
]
LAST = ["torch-manual"]
"""The engine of the test before."""


@pytest.fixture(autouse=True)
def fresh_ranks(ranks, request):
    """torch-library changes DTensor's loss for the process."""
    engine = getattr(request.node, "callspec", SimpleNamespace(params={})).params.get("engine", LAST[0])
    if engine != LAST[0]:
        ranks.end()
    LAST[0] = engine


def traced(
    engine: str, experiment: Experiment, rank: int, plant: Callable[[nn.Module], Any] = lambda module: None
) -> Trace:
    """The trace of one step; on other ranks than the first empty."""
    parallel, mesh = make_parallel(MAKE_ENGINE[engine], experiment.layout, rank, experiment)
    plant(parallel.module)
    balance = next((part for part in parallel.module.modules() if isinstance(part, Balance)), None)
    run = Run(
        request=Request(engine=engine, experiment=experiment, trace=True),
        mesh=mesh,
        rank=SimpleNamespace(at=lambda *_: None),
        corpus=None,
        engine=parallel,
        train_step=None,
        state=Progress(),
        balance=balance,
    )
    if balance:
        balance.total_counts = run.total_over_data
    batch = run.shard_batch(
        {name: x.numpy() for name, x in zip(("inputs", "targets"), batches(0), strict=True)}
    )
    with tempfile.TemporaryDirectory() as folder:
        tracer = Tracer(run, SimpleNamespace(folder=Path(folder)) if rank == 0 else None)
        with tracer.watch(), parallel.step_context():
            forward_backward(run, batch, 1.0)
        forward, backward = read_trace(Path(folder)) if rank == 0 else ({}, {})
        return {**forward}, {**backward}


def compared(
    engine: str,
    layout: Layout,
    rank: int,
    model: dict,
    plant: Callable[[nn.Module], Any] = lambda module: None,
) -> Difference | None:
    """The first difference from one device, on the first rank."""
    single = replace(EXPERIMENT, model=replace(CONFIG, **model))
    experiment = replace(single, layout=layout)
    found = traced(engine, experiment, rank, plant)
    if rank:
        return None
    return first_difference(traced("torch-manual", single, 0), found, experiment, dtype="float64")


@pytest.mark.parametrize(("engine", "layout", "model"), CASES)
@on_ranks
def test_every_place_equals_one_device(rank: int, engine: str, layout: Layout, model: dict) -> None:
    found = compared(engine, layout, rank, model)
    if found:
        assert found.place == "", found.sentence()
        assert found.error < 1e-12


def double(path: str, *, backward: bool) -> Callable[[nn.Module], None]:
    """Double the output of a module of the GPT, or its gradient alone."""

    def change(module: nn.Module, inputs: Any, y: torch.Tensor) -> torch.Tensor:
        if not backward:
            return 2 * y
        y = y.view_as(y)
        y.register_hook(lambda gradient: 2 * gradient)
        return y

    def plant(root: nn.Module) -> None:
        for name, module in root.named_modules():
            if name.endswith(path):
                module.register_forward_hook(change)

    return plant


DDP, TP, PIPELINE = Layout(dp_replicate=4), Layout(tp=4), Layout(pp=2, dp_replicate=2, microbatches=2)
ALL = [0, 1, 2, 3]
PLANTED = [
    (DDP, [1], "1.attn.c_proj", "blocks.1.attention.out", "at row 1 = device 1 of dp_replicate"),
    (TP, [2], "0.mlp.c_fc", "blocks.0.mlp.up", "at features 24-35 = device 2 of tp"),
    (TP, [2], "0.ln_2", "blocks.0.norm2", "only on device 2 of tp"),
    (TP, ALL, "0.ln_2", "blocks.0.norm2", "on all devices of tp"),
    (RING, [1], "0.attn.core", "blocks.0.attention.core", "at positions 1, 6 = device 1 of cp"),
    (PIPELINE, ALL, "1.mlp.c_proj", "blocks.1.mlp.down", "on all devices of dp_replicate"),
]
"""A layout, the ranks that double the output of a module, the place, and the words for the devices."""


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("layout", "wrong", "path", "place", "where"), PLANTED, ids=range(len(PLANTED)))
@on_ranks
def test_planted_mistake_is_named(
    rank: int, layout: Layout, wrong: list, path: str, place: str, where: str, backward: bool
) -> None:
    plant = double(path, backward=backward) if rank in wrong else lambda module: None
    found = compared("torch-manual", layout, rank, {}, plant)
    if found:
        assert found.direction == ("backward" if backward else "forward")
        assert (found.place, found.where) == (place, where), found.sentence()
        assert found.ratio == pytest.approx(2.0)
        assert isinstance(found.before, float)
        assert found.before < 1e-12


@on_ranks
def test_no_hook_is_left(rank: int) -> None:
    """The model of a run is as before: the trace removes its hooks, and a run without one has none."""
    hooks = []

    def plant(module: nn.Module) -> None:
        hooks.extend((part, len(part._forward_hooks)) for part in module.modules())

    traced("torch-manual", replace(EXPERIMENT, layout=Layout(dp_replicate=4)), rank, plant)
    assert all(len(part._forward_hooks) == count for part, count in hooks)


def test_trace_changes_no_number(tmp_path):
    """A traced step computes the same bits, and a run without a trace makes no tracer."""
    data, train = Data(source="synthetic"), replace(EXPERIMENT.train, max_iters=1)
    experiment = replace(EXPERIMENT, data=data, train=train)
    how = {"ladder": True, "later_step": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(trace, "Tracer")
        plain = trained(tmp_path / "plain", experiment, **how)
    traced_run = trained(tmp_path / "traced", experiment, trace=True, **how)
    assert [step.loss for step in plain.steps] == [step.loss for step in traced_run.steps]
    for rung in (Rung.GRADIENTS, Rung.FIRST_WEIGHTS):
        expected, found = (read_tensors(run.folder, rung) for run in (plain, traced_run))
        assert all((found[name] == expected[name]).all() for name in expected)
    assert (tmp_path / "traced" / FORWARD).is_file()
    assert not (tmp_path / "plain" / FORWARD).exists()
