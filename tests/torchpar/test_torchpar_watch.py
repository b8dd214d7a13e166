"""The watch over a step: the module that runs in forward, in backward, and in a recomputed forward."""

import weakref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchpar.measure.ledger import LedgerSink
from torchpar.measure.memory import MemorySink
from torchpar.measure.watch import Sink, Watch


class Inner(nn.Module):
    """Two layers. The second takes the output of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Tanh()
        self.made: list[weakref.ref] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.made.append(weakref.ref(y.untyped_storage()))
        return torch.sin(self.last(y))


class Two(nn.Module):
    """Two layers. The first may be recomputed in backward."""

    def __init__(self, *, again: bool):
        super().__init__()
        self.part, self.second, self.again = Inner(), nn.Linear(8, 1), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)
        return self.second(y)


class Products(Sink):
    """The module of each matrix product and each tanh."""

    def __init__(self):
        self.found = []

    def operator(self, func, operands, result):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "tanh", "tanh_backward"):
            self.found.append((name, self.watch.module, self.watch.in_backward))


def test_watch_modules_of_backward():
    products, model = Products(), Two(again=False)
    with Watch(products) as watch:
        model(torch.ones(4, 8)).sum().backward()
    assert watch.module == ""
    first, last, second = "Two.part.first", "Two.part.last", "Two.second"
    forward = [("addmm", first, False), ("tanh", last, False), ("addmm", second, False)]
    backward = [
        ("mm", second, True),
        ("mm", second, True),
        ("tanh_backward", last, True),
        ("mm", first, True),
    ]
    assert products.found == forward + backward


def test_watch_recomputed_modules():
    products, model = Products(), Two(again=True)
    with Watch(products):
        model(torch.ones(4, 8)).sum().backward()
    assert ("addmm", "Two.part.first", True) in products.found
    assert products.found[-1] == ("mm", "Two.part.first", True)


def test_watch_keeps_no_tensor():
    """PyTorch's ModuleTracker keeps recomputed tensors until the end of the step."""
    for again in (False, True):
        model = Two(again=again)
        with Watch(MemorySink({}, module=model), LedgerSink({})):
            model(torch.ones(4, 8)).sum().backward()
            assert model.part.made
            assert all(made() is None for made in model.part.made)
