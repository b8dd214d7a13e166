"""Which module runs: in forward, in backward, and where backward runs a forward again; nothing is kept."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from compare.contract.memory_profile import Class
from compare.spec.experiment import Model
from torchpar.measure.ledger import LedgerMode
from torchpar.measure.memory import watch_memory
from torchpar.measure.modules import RunningModules
from torchpar.model import GPT
from torchpar.remat import apply_remat


class Inner(nn.Module):
    """A layer, and one in it whose input is its output."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Tanh()
        self.made: list[weakref.ref] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.made.append(weakref.ref(y.untyped_storage()))
        return torch.sin(self.last(y))


class Two(nn.Module):
    """Two layers, the first perhaps computed anew for backward."""

    def __init__(self, *, again: bool):
        super().__init__()
        self.part, self.second, self.again = Inner(), nn.Linear(8, 1), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)
        return self.second(y)


class Noted(TorchDispatchMode):
    """The module of each matrix product and each tanh, as `RunningModules` has it."""

    def __init__(self, running: RunningModules):
        super().__init__()
        self.running, self.seen = running, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "tanh", "tanh_backward"):
            self.seen.append((name, self.running.innermost, self.running.are_in_backward))
        return func(*args, **(kwargs or {}))


def test_backward_is_told_of_the_modules_that_ran_forward():
    model = Two(again=False)
    with RunningModules() as running, Noted(running) as noted:
        model(torch.ones(4, 8)).sum().backward()
    assert running.innermost == ""
    first, last, second = "Two.part.first", "Two.part.last", "Two.second"
    forward = [("addmm", first, False), ("tanh", last, False), ("addmm", second, False)]
    backward = [
        ("mm", second, True),
        ("mm", second, True),
        ("tanh_backward", last, True),
        ("mm", first, True),
    ]
    assert noted.seen == forward + backward


def test_what_backward_computes_anew_is_told_as_well():
    model = Two(again=True)
    with RunningModules() as running, Noted(running) as noted:
        model(torch.ones(4, 8)).sum().backward()
    assert ("addmm", "Two.part.first", True) in noted.seen
    assert noted.seen[-1] == ("mm", "Two.part.first", True)


@pytest.mark.parametrize("again", [False, True])
def test_who_watches_keeps_no_tensor(again):
    """PyTorch's ModuleTracker does: what is computed anew was then there until the end of the step."""
    model = Two(again=again)
    with watch_memory(torch.device("cpu"), {}, module=model), LedgerMode({}):
        model(torch.ones(4, 8)).sum().backward()
        assert model.part.made
        assert all(made() is None for made in model.part.made)


def test_a_watched_gpt_that_computes_its_blocks_anew_peaks_where_it_should():
    """With PyTorch's ModuleTracker its blocks' activations were all there at the end of backward."""
    model = Model(n_layer=6, n_head=2, n_embd=32, block_size=32, vocab_size=512)
    gpt = GPT(model)
    apply_remat(gpt.blocks, "full")
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    held: dict[Class, list[torch.Tensor]] = {"parameters": list(gpt.parameters())}
    with watch_memory(torch.device("cpu"), held, module=gpt) as watching, LedgerMode({}):
        gpt(tokens, tokens)[1].backward()
    expected = 4 * 4 * 32 * (6 * 32 + 2 * 32 + 2)  # inputs of blocks, and both ends
    found = watching.memory().peak.bytes
    assert found["activations"] == pytest.approx(expected, rel=0.1)
