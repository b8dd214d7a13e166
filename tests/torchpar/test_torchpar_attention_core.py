"""An attention core swapped from outside: the same numbers, on one device and with split heads."""

import math
from functools import partial

import pytest
import torch
from modules import normal
from ranks import RANKS, axis, on_ranks
from torch import nn

from compare.spec.experiment import Model
from torchpar.manual.megatron.gpt_parts import of_parts
from torchpar.manual.tensor_parallel import split_layers
from torchpar.model import GPT, CausalAttention
from torchpar.parallel_model import ParallelModel
from torchpar.remat import apply_remat
from torchpar.swap import swap

SIZES = Model(n_layer=2, n_head=4, n_embd=16, block_size=8, vocab_size=50, bias=True)
CORES = "transformer.h.*.attn.core"

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


class WrittenOut(nn.Module):
    """softmax(q k^T / sqrt(D)) v with a mask; it notes the heads that it was given."""

    def __init__(self, old: nn.Module, *, heads: list[int], temperature: float = 1.0):
        super().__init__()
        assert isinstance(old, CausalAttention)
        self.heads, self.temperature = heads, temperature

    def forward(self, q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
        self.heads.append(q_BTHD.shape[2])
        scale = self.temperature * math.sqrt(q_BTHD.shape[-1])
        scores_BHTT = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD) / scale
        future_TT = torch.ones(scores_BHTT.shape[-2:]).triu(1).bool()
        weights_BHTT = scores_BHTT.masked_fill(future_TT, -torch.inf).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", weights_BHTT, v_BTHD)


def make_gpt() -> GPT:
    model = GPT(SIZES).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(normal(*p.shape, seed=i) / 4)
    return model


def loss_and_gradients(model: GPT) -> dict[str, torch.Tensor]:
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_core_of_ones_own_gives_the_same_loss_and_gradients(remat):
    model, swapped, heads = make_gpt(), make_gpt(), []
    swap(swapped, {CORES: partial(WrittenOut, heads=heads)})
    assert list(swapped.state_dict()) == list(model.state_dict())
    apply_remat(swapped.blocks, remat)
    found = loss_and_gradients(swapped)
    close(found, loss_and_gradients(model))
    assert heads == [SIZES.n_head] * SIZES.n_layer * (1 if remat == "none" else 2)  # again in backward


def test_another_core_gives_other_numbers():
    model, swapped = make_gpt(), make_gpt()
    swap(swapped, {CORES: partial(WrittenOut, heads=[], temperature=1.1)})
    assert (loss_and_gradients(swapped)["loss"] - loss_and_gradients(model)["loss"]).abs() > 1e-6


@on_ranks
def test_under_tensor_parallelism_a_core_sees_this_ranks_heads(rank: int) -> None:
    expected = loss_and_gradients(make_gpt())
    for sequence_parallel in (False, True):
        model, heads = make_gpt(), []
        swap(model, {CORES: partial(WrittenOut, heads=heads)})
        split = split_layers(model, axis(), sequence_parallel=sequence_parallel)
        alone = ParallelModel(
            module=model,
            optimizer=torch.optim.SGD(model.parameters()),
            parameters=dict(model.named_parameters()),
        )
        parallel = of_parts(alone, split)
        loss = loss_and_gradients(model)["loss"]
        parallel.finish_gradient_synchronization()
        close({"loss": loss} | dict(parallel.full(parallel.gradients())), expected)
        assert heads == [SIZES.n_head // RANKS] * SIZES.n_layer
