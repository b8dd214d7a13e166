"""The watch over a step: the module that runs in forward, in backward, and in a recomputed forward."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchpar.mlp
import torchpar.model
from compare.contract.request import Request
from compare.numerics.parameters import initial_parameters
from compare.spec.experiment import Experiment, Model, edited
from torchpar.measure.instruments import Instruments
from torchpar.measure.ledger import LedgerSink
from torchpar.measure.memory import MemorySink
from torchpar.measure.watch import Sink, Watch
from torchpar.measure.work import WorkSink
from torchpar.weights import load_weights


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


WIDE = Model(
    n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=11, position="rope", norm="rmsnorm", n_experts=2
)
ROUNDED = {
    "right": ("", "", lambda x: x),
    "norm": ("LayerNorm", "norm", lambda x: x.bfloat16()),
    "router": ("Choice", "router", lambda x: x.bfloat16()),
    "rotation": ("Rotation", "rotation", lambda turn: turn.bfloat16()),
    "cosines": ("Rotation", "rotation", lambda turn: turn.bfloat16().float()),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_dtypes_of_a_model_in_16_bits(monkeypatch, name):
    """Norms, routers and rotations are in float32. A module that gets its input in 16 bits is found."""
    module, what, rounded = ROUNDED[name]
    if module:
        owner = getattr(torchpar.model, module, None) or getattr(torchpar.mlp, module)
        place, forward = (1 if module == "Rotation" else 0), owner.forward

        def narrow(self, *inputs):
            return forward(self, *(rounded(x) if n == place else x for n, x in enumerate(inputs)))

        monkeypatch.setattr(owner, "forward", narrow)
    model, sink = torchpar.model.GPT(WIDE), WorkSink(nn.Module())
    load_weights(model, initial_parameters(Experiment(model=WIDE)))
    tokens = torch.arange(16).view(2, 8) % 11
    with Watch(sink), torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens, tokens)
    kept = sink.result().kept
    assert kept.keys() == {"norm", "router", "rotation", "residual", "loss"}
    assert [part for part, dtypes in kept.items() if dtypes != ["float32"]] == ([what] if what else [])


def test_watch_keeps_no_tensor():
    """PyTorch's ModuleTracker keeps recomputed tensors until the end of the step."""
    for again in (False, True):
        model = Two(again=again)
        with Watch(MemorySink({}, module=model), LedgerSink({})):
            model(torch.ones(4, 8)).sum().backward()
            assert model.part.made
            assert all(made() is None for made in model.part.made)


@pytest.mark.parametrize(("steps", "watched"), [(1, 0), (2, 0), (3, 2), (9, 2)])
def test_watched_step_is_not_step_1(tiny, steps, watched):
    """DDP sends the order of its buckets in step 1."""
    request = Request(engine="torch-library", experiment=edited(tiny, {"train": {"max_iters": steps}}))
    run: Any = SimpleNamespace(request=request, mesh=SimpleNamespace(axes={}))
    assert Instruments(run).watched == watched
