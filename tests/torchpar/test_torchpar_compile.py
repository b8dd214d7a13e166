"""torch.compile around and under torchpar.manual's wrappers: equal to eager, and compiled.

On two of the four ranks, because each compiles for itself; with Dynamo's backends that write no C++.
"""

from functools import partial

import modules
import pytest
import torch
from modules import double, normal
from ranks import on_ranks
from torch import nn
from torch._dynamo.utils import counters

from compare.pipeline.schedules import make_schedule
from torchpar import FSDP, DataParallel
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.manual.megatron.vocab_parallel import VocabParallelCrossEntropy, VocabParallelEmbedding
from torchpar.manual.pipeline_parallel import PipelineParallel
from torchpar.manual.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torchpar.swap import swap

DYNAMO, AUTOGRAD = "eager", "aot_eager"  # the second also traces backward, and takes three times as long
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}


class Layer(nn.Module):
    """Of our own: `compile()` of PyTorch's layers compiles nothing."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=double)
        self.up = nn.Linear(8, width, dtype=double)
        self.down = nn.Linear(width, 8, dtype=double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Units of different sizes, so that Dynamo takes what differs for dynamic; one is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for width in (5, 16, 9))
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8, dtype=double))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().mean()


def in_eager(module: Stack, model: nn.Module, backend: str) -> nn.Module:
    return model


def by_layer(module: Stack, model: nn.Module, backend: str) -> nn.Module:
    for layer in module.layers:
        layer.compile(backend=backend)
    return model


def inside(module: Stack, model: nn.Module, backend: str) -> nn.Module:
    module.compile(backend=backend)
    return model


def outside(module: Stack, model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)


def pair() -> Axis:
    """Two ranks."""
    return Axis.of(process_groups.make_group([[0, 1], [2, 3]]))


def train(axis: Axis, wrap, way, backend: str = DYNAMO) -> dict[str, torch.Tensor]:
    module = Stack()
    model = wrap(module, group=axis)
    called = way(module, model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        called(normal(16, 8, seed=step).chunk(2)[axis.rank]).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            called(normal(4, 8))
    return model.full_state_dict() if isinstance(model, FSDP) else module.state_dict()


@pytest.mark.parametrize(
    ("wrap", "way", "backend"),
    [
        pytest.param(FSDP, by_layer, AUTOGRAD, id="zero3, layers, with backward"),
        pytest.param(FSDP, outside, DYNAMO, id="zero3, wrapper"),
        pytest.param(partial(FSDP, reshard_after_forward=False), inside, DYNAMO, id="shard_grad_op, module"),
        pytest.param(partial(FSDP, zero=2), by_layer, DYNAMO, id="zero2, layers"),
        pytest.param(DataParallel, by_layer, DYNAMO, id="data_parallel, layers"),
        pytest.param(DataParallel, outside, DYNAMO, id="data_parallel, wrapper"),
    ],
)
@on_ranks
def test_compiled_equals_eager_and_sends_the_same(rank: int, wrap, way, backend: str) -> None:
    eager, compiled = pair(), pair()
    if rank > 1:
        return
    expected = train(eager, wrap, in_eager)
    torch._dynamo.reset()
    counters.clear()
    modules.assert_same(train(compiled, wrap, way, backend), expected, **TOLERANCE)
    assert counters["stats"]["unique_graphs"] >= 1
    assert compiled.traffic.bytes == eager.traffic.bytes
    # Nothing that Dynamo happened upon inside of a hook.
    assert not [reason for reason in counters["graph_break"] if "torchpar's hooks" not in reason]


class Net(nn.Module):
    """Everything that can be split."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8, dtype=double)
        self.layer = Layer(16)
        self.head = nn.Linear(8, 10, dtype=double)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.layer(self.embedding(ids))), ids)


@on_ranks
def test_tensor_parallel_layers(rank: int) -> None:
    ids, whole = torch.arange(8), Net()
    axes = [pair(), pair()]
    if rank > 1:
        return
    results = []
    for axis in axes:
        net = Net()
        column = partial(ColumnParallelLinear.from_linear, axis=axis)
        makers = {
            "embedding": partial(VocabParallelEmbedding.from_embedding, axis=axis),
            "layer.up": column,
            "layer.down": partial(RowParallelLinear.from_linear, axis=axis),
            "head": partial(column, padded=True),
            "loss": lambda loss, axis=axis: VocabParallelCrossEntropy(axis, vocab_size=10),
        }
        swap(net, makers)
        if axis is axes[1]:
            net.compile(backend=DYNAMO)
        loss = net(ids)
        loss.backward()
        results.append({"loss": loss, **modules.gradients(net)})
    torch.testing.assert_close(results[1]["loss"], whole(ids), **TOLERANCE)
    modules.assert_same(results[1], results[0], **TOLERANCE)
    assert axes[1].traffic.bytes == axes[0].traffic.bytes


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@on_ranks
def test_stages_of_a_pipeline(rank: int, schedule: str) -> None:
    x, y = normal(8, 8, seed=1).chunk(4), normal(8, 8, seed=2).chunk(4)
    axis, results = pair(), []
    if rank > 1:
        return
    for compiled in (False, True):
        torch.manual_seed(rank)
        stage = Layer(12)
        if compiled:
            stage.compile(backend=DYNAMO)
        pipeline = PipelineParallel(
            {rank: stage},
            schedule=make_schedule(schedule, ranks=2, microbatches=4),
            loss=nn.functional.mse_loss,
            boundary=lambda stage, x: torch.empty(x.shape, dtype=double, device="meta"),
            group=axis,
        )
        losses = [pipeline.run(x, y) for _ in range(2)]
        results.append({"loss": losses[1], **modules.gradients(stage)})
    modules.assert_same(results[1], results[0], **TOLERANCE)
