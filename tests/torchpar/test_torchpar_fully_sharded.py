"""FSDP of torch-manual: its peak of memory and the order of its gathers, on four gloo ranks."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.support.ranks import ALONE, RANKS, axis, on_ranks
from torchpar.manual.fully_sharded import FSDP, Unit
from torchpar.measure.memory import MemorySink, resident_bytes
from torchpar.measure.watch import Watch

double = torch.float64


def stack(layers: int, width: int = 16) -> nn.Sequential:
    """Linear layers in float64, equal on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width, dtype=double) for _ in range(layers)))


def sharded_by_layer(module: nn.Sequential) -> FSDP:
    return FSDP(
        module,
        units=[[layer] for layer in module],
        axis_of=dict.fromkeys(module.parameters(), axis()),
        shards=axis(),
        replicas=ALONE,
        zero=3,
        reshard_after_forward=True,
        inputs_only=(),
        fill=lambda modules: None,
    )


def transient(sharded: FSDP) -> list[torch.Tensor]:
    return [flat.full for flat in sharded.flats]


def watched(sharded: FSDP) -> MemorySink:
    """A memory sink that knows the tensors from before the pass."""
    return MemorySink({"parameters": sharded.parameters(), "gathered parameters": transient(sharded)})


def most_gathered(memory: MemorySink) -> int:
    return max(memory.result().curve.bytes["gathered parameters"])


@on_ranks
def test_peak_is_shard_and_two_units(rank: int) -> None:
    layers, width = 8, 64
    sharded = sharded_by_layer(stack(layers, width))
    unit = (width * width + width) * 8
    x = torch.ones(1, width, dtype=double)
    activations = 8 * width * 4 * layers
    beyond = []
    for _ in range(4):
        for piece in sharded.parameters():
            piece.grad = None
        shards = resident_bytes(sharded.parameters())
        memory = watched(sharded)
        with Watch(memory):
            sharded(x).sum().backward()
            sharded.finish_gradient_synchronization()
        assert most_gathered(memory) == 2 * unit
        beyond.append((memory.result().peak.total - 2 * shards - activations) / unit)
    # Gradients: a unit's buffer, a layer's gradient, and a unit that is reduced with its exchange. This is
    # the minimum of several steps: gloo's thread may free the tensors of a finished collective late.
    assert min(beyond) <= 2 + 4, beyond
    assert shards == pytest.approx(layers * unit / RANKS, rel=0.01)
    memory = watched(sharded)
    with Watch(memory), torch.no_grad():
        sharded(x)
    assert memory.result().peak.total <= shards + 2 * unit + activations


@on_ranks
def test_next_unit_is_gathered_ahead(rank: int) -> None:
    module = stack(3)
    order: list[str] = []
    start_gather = Unit.start_gather
    sharded = sharded_by_layer(module)

    def log(unit: Unit) -> None:
        order.append(f"gather {sharded.units.index(unit)}")
        start_gather(unit)

    for index, layer in enumerate(module):
        layer.register_forward_hook(lambda *_, index=index: order.append(f"forward {index}"))
        layer.register_full_backward_hook(lambda *_, index=index: order.append(f"backward {index}"))
    with patch.object(Unit, "start_gather", log):
        for _ in range(2):
            order.clear()
            sharded(torch.ones(1, 16, dtype=double, requires_grad=True)).sum().backward()
            sharded.finish_gradient_synchronization()
    assert order == [
        *("gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "forward 2"),
        *("gather 1", "backward 2", "gather 0", "backward 1", "backward 0"),
    ]
