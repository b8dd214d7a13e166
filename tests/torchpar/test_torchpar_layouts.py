"""Layouts of torchpar's engines on four gloo ranks, in float64, against one device and closed forms.

The reference is the plain GPT on the whole batch, with PyTorch's clipping and optimizer. The ranks do not
divide the sizes, and some vectors are shorter than a shard.
"""

import re
from collections.abc import Iterable

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compare.contract.communication import LOSS
from compare.contract.work import ObservedWork
from compare.spec.axes import DP_REPLICATE
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, Layout, Precision, Train
from compare.theory.communication import bytes_sent
from tests.support.gpt_steps import (
    ADAM,
    CONFIG,
    SGD,
    assert_same,
    backward,
    count,
    make_gpt,
    make_parallel,
    reference,
    train,
    update,
)
from tests.support.layouts import TORCH_COMPILER, TORCH_LIBRARY, TORCH_SHARED, TORCH_ZERO
from tests.support.ranks import counted, on_ranks
from tests.support.rows import short
from torchpar import compiler, library, manual
from torchpar.comm import process_groups
from torchpar.compilation import compile_blocks, resolve_backend
from torchpar.engine import Engine
from torchpar.library.tensor_parallel import split_layers
from torchpar.model import GPT
from torchpar.sharding import local
from torchpar.train import MAKE_ENGINE
from torchpar.weights import moment_keys

TORCH_MANUAL = TORCH_ZERO | {name: TORCH_SHARED[name] for name in ("ddp", "tp_sp", "fsdp_tp")}
TORCH_MANUAL["fsdp_tp_sp"] = Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True)
LAYOUTS = {"torch-manual": TORCH_MANUAL, "torch-library": TORCH_LIBRARY, "torch-compiler": TORCH_COMPILER}
COVERED = ("zero1", "ddp_tp", "fsdp_tp")
"""Layouts of torch-compiler that run with SGD or a split sequence; see also test_torchpar_checkpoint.py."""
BY_SGD = {
    "torch-manual": ("zero1", "zero3", "hsdp", "hybrid_zero1", "tp_sp"),
    "torch-library": ("zero1", "fsdp_tp_sp"),
    "torch-compiler": ("zero1",),
}
CASES = [
    (engine, optimizer, name)
    for engine, layouts in LAYOUTS.items()
    for optimizer, names in (("adamw", layouts), ("sgd", BY_SGD[engine]))
    for name in names
    if (engine, optimizer) != ("torch-compiler", "adamw") or name not in COVERED
]
BLOCKS = CONFIG.n_layer


def assert_cut(engine: Engine, experiment: Experiment, layout: Layout, name: str) -> None:
    """Assert the sizes of parameters and moments on this rank."""

    def elements(tensors: Iterable[torch.Tensor]) -> int:
        return sum(local(tensor.detach()).numel() for tensor in tensors)

    whole = [*make_gpt(experiment.model).parameters()]
    spare = 4 * CONFIG.n_embd * len(whole)  # padding: at most a row of each, for each of two axes
    if layout.tp > 1:  # vectors and positions are whole
        spare += sum(p.numel() for p in whole if p.ndim == 1) + CONFIG.block_size * CONFIG.n_embd
    share = elements(whole) / layout.tp + spare
    state, updated = engine.optimizer.state.values(), elements(engine.parameters.values())
    (key, *_) = moment_keys(experiment.optimizer).values()
    moments = elements(entry[key] for entry in state if entry)
    if engine.sharding.owned:  # whole parameters: a share is off by at most the largest
        assert moments <= share / layout.dp_shard + CONFIG.vocab_size * CONFIG.n_embd, name
        assert moments < updated, name
    else:
        assert moments == updated <= share / (layout.dp_shard if layout.zero else 1) + spare, name
    if layout.zero == 3:
        assert elements(engine.module.parameters()) <= share / layout.dp_shard + spare, name


LAST = [""]
"""The engine of the test before."""


@pytest.fixture(autouse=True)
def fresh_ranks(ranks, request):
    """torch-library changes DTensor's loss for the process, and DTensor caches plans of a mesh."""
    engine = request.node.callspec.params.get("engine", "") if hasattr(request.node, "callspec") else ""
    if not engine or engine != LAST[0]:
        ranks.end()
    LAST[0] = engine


@pytest.mark.parametrize(("engine", "optimizer", "name"), CASES)
@on_ranks
def test_layout_equals_one_device(rank: int, engine: str, optimizer: str, name: str) -> None:
    experiment, layout = {"adamw": ADAM, "sgd": SGD}[optimizer], LAYOUTS[engine][name]
    if engine == "torch-compiler":  # no message of DTensor is of two layers: one is enough
        experiment = replace(experiment, model=replace(CONFIG, n_layer=1))
    got, parallel = train(MAKE_ENGINE[engine], layout, rank, experiment)
    assert_same(got, reference(experiment), name)
    assert_cut(parallel, experiment, layout, name)


@pytest.mark.parametrize("engine", ["torch-manual"])
@pytest.mark.parametrize("name", [name for name, layout in TORCH_MANUAL.items() if layout.tp == 1])
@on_ranks
def test_manual_sends_closed_form(rank: int, engine: str, name: str) -> None:
    """With tp the ranks do not divide the vocabulary: see test_torchpar_tensor_parallel.py."""
    layout = TORCH_MANUAL[name]
    parallel, mesh = make_parallel(manual.make_engine, layout, rank, ADAM)
    for step in range(2):  # the first step begins with gathered parameters
        with counted() as counts:
            backward(parallel, mesh, step)
            update(parallel, ADAM.optimizer, step)
    sent = {tuple(call): size for call, size in counts.items()}
    experiment = replace(
        ADAM,
        layout=layout,
        train=Train(batch_size=4, gradient_accumulation_steps=2),
        precision=Precision(dtype="float64"),
    )
    for item, size in bytes_sent("torch-manual", experiment).items():
        off = 0.01 * (item[1] == DP_REPLICATE)  # the last shard is shorter
        if item[2] != LOSS:
            assert sent.pop(item) == pytest.approx(size, rel=off), item
    assert all(size <= 8 for size in sent.values()), sent  # the norm


@on_ranks
def test_ledger_of_torch_library(rank: int) -> None:
    """FSDP2 gathers blocks twice and the root once. The ledger has DTensor's activations and loss, too."""
    layout, parameter_bytes = TORCH_LIBRARY["zero3"], 8 * sum(p.numel() for p in make_gpt().parameters())
    parallel, mesh = make_parallel(library.make_engine, replace(layout, remat="none"), rank, ADAM)
    rows = count(parallel, mesh)
    assert rows["reduce_scatter", "gradients"].calls == BLOCKS + 1
    assert rows["all_gather", "parameters"].calls == 2 * (2 * BLOCKS + 1)  # two passes
    padded = rows["reduce_scatter", "gradients"].bytes
    assert parameter_bytes <= padded <= parameter_bytes + 8 * 3 * 12 * len(parallel.parameters)
    parallel, mesh = make_parallel(library.make_engine, Layout(tp=4), rank, ADAM)
    rows = count(parallel, mesh)
    # A pass: 2 a layer forward and backward, embedding, head; maximum, sum and target logit of the loss.
    assert rows["all_reduce", "activations"].calls == 2 * (2 * BLOCKS + 1)
    assert rows["all_reduce", "loss"].calls == 2 * 3
    assert rows["all_reduce", "activation gradients"].calls == 2 * (2 * BLOCKS + 1)


@on_ranks
def test_torch_compiler_step_is_one_graph(rank: int) -> None:
    """torch.compile fails where it would break the graph of a pass. All layers are alike: one is enough."""
    experiment = replace(ADAM, model=replace(CONFIG, n_layer=1))
    for name in ("cp", "fsdp_tp_sp"):
        layout = replace(TORCH_COMPILER[name], compile="aot_eager")
        got, parallel = train(compiler.make_engine, layout, rank, experiment)
        assert_same(got, reference(experiment), name)
    seen = ObservedWork(products={}, forward={"activations": 9}, again={}, logits_positions=[])
    work = parallel.compiled(seen)
    assert work.compiled == "aot_eager, 1 graph"
    assert (work.forward["activations"], work.forward["logits"]) == (1, 1)


@on_ranks
def test_small_vocabulary_is_rejected(rank: int) -> None:
    mesh = DeviceMesh.from_group(process_groups.world_group(), "cpu", mesh_dim_names=("tp",))
    tiny = GPT(msgspec.structs.replace(CONFIG, vocab_size=5))
    with pytest.raises(ValueError, match="tp = 4 leaves a rank without any of vocab_size = 5"):
        split_layers(tiny, mesh, sequence_parallel=False)


FULL = Layout(remat="full", compile="aot_eager")
HALVED = Layout(pp=2, schedule="zero_bubble", microbatches=2)
BLOCK = Layout(compile="block")
REFUSED = (
    ("torch-library", Layout(dp_shard=2, tp=2, zero=1), r"layout.zero = 1 with layout.tp = 2: .*DTensor"),
    ("torch-library", Layout(cp=2, context="ring"), "one of three CUDA kernels, none of them in float64"),
    ("torch-library", Layout(cp=2, context="ulysses"), "one of three CUDA kernels, none of them in float64"),
    ("torch-library", replace(HALVED, cp=2), "zero_bubble splits backward in two"),
    ("torch-library", replace(HALVED, dp_replicate=2), "zero_bubble.*DDP reduces wrongly"),
    ("torch-library", replace(HALVED, dp_shard=2, zero=3), "zero_bubble.*FSDP2 not at all"),
    ("torch-library", replace(HALVED, tp=2), "zero_bubble.*DTensor"),
    ("torch-library", replace(HALVED, remat="dots"), "zero_bubble.*selective recomputation"),
    ("torch-manual", replace(HALVED, compile="block"), "backward of a compiled block is one program"),
    ("torch-library", replace(HALVED, compile="block"), "backward of a compiled block is one program"),
    ("torch-manual", replace(BLOCK, cp=2, context="ring"), "no hop would hide behind a product"),
    ("torch-compiler", BLOCK, "plans the whole step"),
    ("torch-compiler", Layout(pp=2, schedule="gpipe", microbatches=2), "= gpipe: DTensor has no shift"),
    ("torch-compiler", Layout(cp=2, context="ring"), "= ring: .*no placement for keys in transit"),
    ("torch-compiler", Layout(cp=2, context="ulysses"), "= ulysses: .*with a gather"),
    ("torch-compiler", Layout(offload="optimizer"), "moments are DTensors"),
    ("torch-compiler", FULL, "cannot recompute whole layers"),
    ("torch-compiler", replace(FULL, dp_replicate=2), "cannot recompute whole layers"),
)


@pytest.mark.parametrize(("engine", "layout", "words"), REFUSED, ids=map(short, REFUSED))
def test_engine_rejects_layout(engine, layout, words):
    assert re.search(words, ENGINES[engine].why_not(layout))
    assert ENGINES["torch-manual"].why_not(replace(layout, compile="none")) == ""


def test_backend_of_compilation(monkeypatch):
    library_s = ENGINES["torch-library"]
    assert library_s.why_not(Layout(dp_shard=2, tp=2, zero=2)) == ""
    assert ENGINES["torch-compiler"].why_not(replace(FULL, compile="none")) == ""
    assert library_s.gradient_sync_for(Layout(dp_replicate=2, tp=2)) == "fsdp2"
    assert library_s.gradient_sync_for(Layout(dp_replicate=2)) == "ddp"
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"layout.compile = inductor requires a C"):
        resolve_backend(Layout(compile="inductor"), torch.device("cpu"))
    on_gpu = {remat: resolve_backend(Layout(remat=remat), torch.device("cuda")) for remat in ("dots", "full")}
    assert on_gpu == {"dots": "inductor", "full": "none"}
    with pytest.raises(
        ValueError, match=r"compile = block requires a C\+\+ compiler: install one or set none"
    ):
        compile_blocks(nn.ModuleList(), BLOCK, torch.device("cpu"))
    assert compile_blocks(nn.ModuleList(), Layout(), torch.device("cpu")) is None
    assert resolve_backend(Layout(), torch.device("cpu")) == "none"
