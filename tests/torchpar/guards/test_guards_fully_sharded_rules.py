"""torchpar.FSDP at the edges of what it promises: what it does there, or says, on four gloo ranks."""

from functools import partial

import modules
import pytest
import torch
from modules import Odd, double, ids, share, stack
from ranks import on_ranks
from torch import nn

from torchpar import FSDP
from torchpar.guards.units import default_units

# Averages of four partial means in another order than one mean over all: a few units in the last place.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}
close = partial(torch.testing.assert_close, **TOLERANCE)
assert_same = partial(modules.assert_same, **TOLERANCE)


def whole_gradients(sharded: FSDP) -> dict[str, torch.Tensor]:
    """Zero where there is none."""
    return sharded.gather(
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in sharded.pieces.items()}
    )


class Uneven(nn.Module):
    """Two cuts: ranks 0 and 1 hold `always`, 2 and 3 `sometimes`."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = (nn.Parameter(torch.ones(8, dtype=double)) for _ in range(2))

    def forward(self, use: bool) -> torch.Tensor:
        return (self.always + self.sometimes if use else self.always).sum()


@pytest.mark.parametrize("zero", [3, 2])
@on_ranks
def test_unused_parameters_count_as_zero_where_that_is_announced(rank: int, zero: int) -> None:
    for idle in (0, 1, 2, 3):
        sharded = FSDP(Uneven(), zero=zero, find_unused_parameters=True)
        for _ in range(2):  # the second time in a buffer that is not new
            sharded.zero_grad()
            sharded(rank != idle).backward()
            sharded.finish_gradient_synchronization()
        assert all(p.grad is not None for p in sharded.parameters())  # of the rank that is idle, too
        whole = whole_gradients(sharded)
        close(whole["always"], torch.full((8,), 1.0, dtype=double))
        close(whole["sometimes"], torch.full((8,), 0.75, dtype=double))


@on_ranks
def test_unused_on_all_ranks_is_none_and_two_passes_add_up(rank: int) -> None:
    reference, sharded = Odd(), FSDP(Odd(), find_unused_parameters=True)
    reference.layers[1].inner.requires_grad_(False)
    sharded.module.layers[1].inner.requires_grad_(False)
    for step in range(2):
        reference(ids(step)).backward()
        with sharded.no_sync():
            sharded(share(ids(step), rank)).backward()
    sharded.finish_gradient_synchronization()
    assert sharded.pieces["layers.1.inner.weight"].grad is None
    expected = modules.gradients(reference)
    assert_same({name: whole_gradients(sharded)[name] for name in expected}, expected)


@on_ranks
def test_a_lost_gradient_is_an_error_that_names_the_parameter(rank: int) -> None:
    sharded = FSDP(Uneven())
    sharded(rank != 2).backward()
    if rank != 2:  # the idle one holds a piece of it
        sharded.finish_gradient_synchronization()
        return
    with pytest.raises(RuntimeError, match=r"sometimes has a gradient .* none on rank 2.*find_unused"):
        sharded.finish_gradient_synchronization()


@pytest.mark.parametrize("zero", [3, 2])
@on_ranks
def test_zero_grad_drops_what_is_not_reduced(rank: int, zero: int) -> None:
    reference, sharded = Odd(), FSDP(Odd(), zero=zero)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    (100 * sharded(ids())).backward()
    sharded.zero_grad()  # a step that is skipped
    for _ in range(2):
        reference(ids()).backward()
        loss = sharded(share(ids(), rank))
        sharded.zero_grad(set_to_none=False)  # which is fine between forward and backward
        loss.backward()
        sharded.finish_gradient_synchronization()
        expected = modules.gradients(reference)
        assert_same({name: whole_gradients(sharded)[name] for name in expected}, expected)
        reference.zero_grad()
    sharded.zero_grad(set_to_none=False)
    assert all(p.grad is None or not p.grad.any() for p in optimizer.param_groups[0]["params"])
    assert sharded.pieces["strided"].grad is not None


class ScaledEmbedding(nn.Embedding):
    """Backward reads `scale`, other than the weight that it has from its base."""

    def __init__(self, count: int, width: int):
        super().__init__(count, width, dtype=double)
        self.scale = nn.Parameter(torch.linspace(1, 2, width, dtype=double))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


@on_ranks
def test_a_class_made_from_an_embedding_is_gathered_for_backward(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(ScaledEmbedding(7, 16), *stack(2))
    torch.manual_seed(0)
    sharded = FSDP(nn.Sequential(ScaledEmbedding(7, 16), *stack(2)))
    reference(ids()).square().mean().backward()
    sharded(share(ids(), rank)).square().mean().backward()
    sharded.finish_gradient_synchronization()
    assert_same(whole_gradients(sharded), modules.gradients(reference))


@on_ranks
def test_what_was_saved_whole_can_be_loaded(rank: int) -> None:
    for zero in (3, 2):
        source = Odd(seed=5)
        source.offset += 1.0
        sharded = FSDP(Odd(), zero=zero)
        sharded(ids()).backward()
        sharded.load_full_state_dict(source.state_dict())
        assert_same(sharded.full_state_dict(), source.state_dict())
        close(sharded(ids()), source(ids()))
        again = FSDP(Odd(), zero=zero)
        again.load_full_state_dict(sharded.full_state_dict())
        close(again(ids()), source(ids()))
    state = sharded.full_state_dict()
    with pytest.raises(ValueError, match=r"^strided is \(6, 5\), and the state has \(5, 6\)$"):
        sharded.load_full_state_dict({**state, "strided": torch.zeros(5, 6)})
    del state["offset"], state["strided"]
    with pytest.raises(ValueError, match=r"^the state has no strided, offset$"):
        sharded.load_full_state_dict(state)


class Promoted(nn.Module):
    """A float32 buffer between two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("position", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x) + self.position)


@on_ranks
def test_compute_dtype_holds_in_every_unit(rank: int) -> None:
    sharded = FSDP(Promoted(), compute_dtype=torch.bfloat16)
    output = sharded(torch.ones(2, 4))
    assert output.dtype == torch.bfloat16
    assert sharded.module.position.dtype == torch.float32
    output.sum().backward()
    sharded.finish_gradient_synchronization()
    assert all(p.grad.dtype == torch.float32 for p in sharded.parameters())


class Listed(nn.Module):
    """A list of lists of parameters and of dicts of layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scales = nn.ModuleList(nn.ParameterList([torch.ones(3, dtype=double)]) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(3, 3, dtype=double) for name in ("a", "b")}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (scale,), pair in zip(self.scales, self.layers, strict=True):
            x = pair["b"](torch.tanh(pair["a"](x * scale)))
        return x.square().mean()


@on_ranks
def test_lists_of_parameters_and_of_dicts(rank: int) -> None:
    reference, module = Listed(), Listed()
    assert list(default_units(module)) == [pair[name] for pair in module.layers for name in ("a", "b")]
    sharded = FSDP(module)
    x = torch.linspace(-1, 1, 24, dtype=double).view(8, 3)
    reference(x).backward()
    sharded(share(x, rank)).backward()
    sharded.finish_gradient_synchronization()
    assert_same(whole_gradients(sharded), modules.gradients(reference))


@on_ranks
def test_with_nothing_to_train_the_norm_is_zero(rank: int) -> None:
    sharded = FSDP(nn.Linear(2, 2).requires_grad_(False))
    assert sharded.clip_grad_norm_(1.0) == 0.0
    assert FSDP(nn.ReLU()).clip_grad_norm_(1.0) == 0.0
