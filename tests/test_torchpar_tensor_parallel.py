"""Tensor-parallel layers around modules of all kinds, on four gloo ranks, in float64.

One launch of a fresh interpreter runs every case below; a rank that disagrees ends it with its traceback.
The oracle is the same module, whole, on one rank.
"""

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compare.contract.experiment import Model
from torchpar import collectives
from torchpar.collectives import Axis
from torchpar.launch import bind_to_loopback, launch
from torchpar.manual import conjugates
from torchpar.manual.conjugates import (
    Split,
    all_gather_to,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)
from torchpar.manual.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    swap,
    synchronize_replicated_gradients,
    tensor_parallel,
)
from torchpar.manual.vocab_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from torchpar.model import GPT
from torchpar.plan import Plan
from torchpar.rank import Rank
from torchpar.remat import apply_remat
from torchpar.traffic import Call

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
RANKS = 4
# Sums in another order than one device's: a few units in the last place, of numbers of order 1.
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def axis() -> Axis:
    return Axis.of(None)


def part(whole: torch.Tensor, dim: int) -> torch.Tensor:
    return whole.chunk(RANKS, dim)[axis().rank]


def case_each_function_and_its_backward(rank: Rank) -> None:
    mine, weight = normal(3, 8, seed=rank.rank), normal(3, 8, seed=9)
    total = sum(normal(3, 8, seed=r) for r in range(RANKS))
    joined = torch.cat([normal(3, 8, seed=r) for r in range(RANKS)], 1)
    wide, narrow = normal(3, 8 * RANKS, seed=9), part(weight, 1)
    for function, value, cotangent, gradient in (
        (copy_to, mine, weight, RANKS * weight),
        (reduce_from, total, weight, weight),
        (scatter_to, part(mine, -1), narrow, torch.cat([part_of(weight, r) for r in range(RANKS)], 1)),
        (gather_from, joined, wide, part(wide, 1)),
        (partial(all_gather_to, dim=1), joined, wide, RANKS * part(wide, 1)),
        (partial(reduce_scatter_from, dim=1), part(total, 1), narrow, weight),
    ):
        leaf = mine.clone().requires_grad_()
        output = function(leaf, axis())
        (output * cotangent).sum().backward()
        close(output, value)
        close(leaf.grad, gradient)


def part_of(whole: torch.Tensor, r: int) -> torch.Tensor:
    return whole.chunk(RANKS, 1)[r]


class Net(nn.Module):
    """Fused pairs, a frozen bias, a norm between, whatever activation: nothing like a GPT."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 24, dtype=torch.float64)  # two tensors of 12 side by side, multiplied
        self.down = nn.Linear(12, 6, dtype=torch.float64)
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.out = nn.Linear(6, 8, bias=False, dtype=torch.float64)
        self.up.bias.requires_grad_(False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x_BTC).unflatten(-1, (2, -1)).unbind(-2)
        return self.out(self.norm(self.down(torch.sigmoid(gate) * value) + x_BTC))


def reference_net(x_BTC: torch.Tensor) -> tuple[Net, torch.Tensor, torch.Tensor]:
    net = Net()
    leaf = x_BTC.clone().requires_grad_()
    y = net(leaf)
    y.sin().sum().backward()
    return net, y, leaf.grad


def assert_gradients(whole: nn.Module, split: nn.Module) -> None:
    assert [name for name, _ in split.named_parameters()] == [name for name, _ in whole.named_parameters()]
    modules = dict(split.named_modules())
    for name, expected in whole.named_parameters():
        got = split.get_parameter(name)
        assert got.requires_grad == expected.requires_grad, name
        if not expected.requires_grad:
            continue
        path, _, leaf = name.rpartition(".")
        cut = getattr(modules[path], "split", None)
        is_cut = cut is not None and not (leaf == "bias" and isinstance(modules[path], RowParallelLinear))
        gradient = cut.gather(got.grad, axis()) if is_cut else got.grad
        close(gradient, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


def case_column_and_row_around_any_module(rank: Rank) -> None:
    x_BTC = normal(2, 8, 6)
    whole, y, gradient = reference_net(x_BTC)
    net = Net()
    swap(
        net,
        {
            "up": partial(ColumnParallelLinear.from_linear, axis=axis(), groups=2),
            "down": partial(RowParallelLinear.from_linear, axis=axis()),
            "out": partial(ColumnParallelLinear.from_linear, axis=axis(), gather_output=True),
        },
    )
    assert net.up.weight.shape == (6, 6)
    leaf = x_BTC.clone().requires_grad_()
    out = net(leaf)
    close(out, y)
    out.sin().sum().backward()
    close(leaf.grad, gradient)
    assert_gradients(whole, net)


def case_sequence_parallel_around_any_module(rank: Rank) -> None:
    x_BTC = normal(2, 8, 6)
    whole, y, gradient = reference_net(x_BTC)
    net = Net()
    swap(
        net,
        {
            "up": partial(ColumnParallelLinear.from_linear, axis=axis(), groups=2, sequence_dim=1),
            "down": partial(RowParallelLinear.from_linear, axis=axis(), sequence_dim=1),
            "out": partial(ColumnParallelLinear.from_linear, axis=axis(), sequence_dim=1, gather_output=True),
        },
    )
    leaf = part(x_BTC, 1).clone().requires_grad_()
    out = net(leaf)
    close(out, y)
    out.sin().sum().backward()
    close(leaf.grad, part(gradient, 1))
    replicated = [p.grad for p in (net.norm.weight, net.norm.bias, net.down.bias)]
    with pytest.raises(AssertionError, match=r"down\.bias"):
        assert_gradients(whole, net)
    synchronize_replicated_gradients(replicated, axis())
    assert_gradients(whole, net)


def case_row_parallel_can_split_its_input(rank: Rank) -> None:
    whole = nn.Linear(12, 5, dtype=torch.float64)
    with torch.no_grad():
        for i, p in enumerate(whole.parameters()):
            p.copy_(normal(*p.shape, seed=i))
    split = RowParallelLinear.from_linear(whole, axis(), split_input=True)
    x, x2 = (normal(3, 12).requires_grad_() for _ in range(2))
    close(split(x2), whole(x))
    whole(x).square().sum().backward()
    whole_weight_grad = whole.weight.grad
    split(x2).square().sum().backward()
    close(x2.grad, x.grad)
    close(split.split.gather(split.weight.grad, axis()), whole_weight_grad)


def case_cuts_round_trip(rank: Rank) -> None:
    for shape, split in (
        ((24, 5), Split(dim=0, size=24, groups=3)),
        ((5, 8), Split(dim=1, size=8)),
        ((10, 3), Split(dim=0, size=10, padded=True)),
        ((2, 3), Split(dim=0, size=2, padded=True)),  # fewer rows than ranks
        ((15,), Split(dim=0, size=15, groups=3, padded=True)),
    ):
        whole = normal(*shape)
        mine = split.take(whole, axis())
        assert torch.equal(split.gather(mine, axis()), whole), split
        assert mine.untyped_storage().nbytes() == mine.nbytes  # the whole is not kept


def case_embedding_and_loss_over_a_vocabulary_that_does_not_divide(rank: Rank) -> None:
    for vocab in (10, 5, 2, 8):  # 5 and 2 leave ranks with padding alone
        ids = torch.arange(14).remainder(vocab).view(2, 7)
        targets = ids.roll(1).flatten().masked_fill(torch.arange(14) == 3, -100)
        whole = nn.Embedding(vocab, 4, dtype=torch.float64)
        with torch.no_grad():
            whole.weight.copy_(normal(vocab, 4))
        split = VocabParallelEmbedding.from_embedding(copy.deepcopy(whole), axis())
        head = ColumnParallelLinear.from_linear(as_linear(whole), axis(), padded=True)
        head.weight = split.weight
        x, x2 = whole(ids), split(ids)
        assert torch.equal(x, x2)
        for reduction in ("none", "sum", "mean"):
            whole.zero_grad()
            split.zero_grad()
            logits = whole(ids).flatten(0, 1) @ whole.weight.t()
            loss = F.cross_entropy(logits, targets, reduction=reduction)
            loss2 = vocab_parallel_cross_entropy(
                head(split(ids).flatten(0, 1)), targets, axis(), vocab_size=vocab, reduction=reduction
            )
            close(loss2, loss)
            loss.square().sum().backward()
            loss2.square().sum().backward()
            close(split.split.gather(split.weight.grad, axis()), whole.weight.grad)
            padding = split.weight.grad[max(vocab - rank.rank * len(split.weight), 0) :]
            assert not padding.any()


def as_linear(embedding: nn.Embedding) -> nn.Linear:
    linear = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, dtype=torch.float64)
    linear.weight = embedding.weight
    return linear


def case_loss_of_extreme_and_of_bfloat16_logits(rank: Rank) -> None:
    logits, targets = 1e4 * normal(6, 8), torch.arange(6)
    close(vocab_parallel_cross_entropy(part(logits, 1), targets, axis()), F.cross_entropy(logits, targets))
    leaf = part(normal(6, 8), 1).bfloat16().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, targets, axis())
    loss.backward()
    assert (loss.dtype, leaf.grad.dtype) == (torch.float32, torch.bfloat16)
    reference = torch.cat([normal(6, 8).chunk(RANKS, 1)[r].bfloat16().float() for r in range(RANKS)], 1)
    close(loss, F.cross_entropy(reference, targets), rtol=1e-6, atol=1e-6)


CONFIG = Model(n_layer=2, n_head=4, n_embd=16, block_size=8, vocab_size=50, bias=True)


def make_gpt() -> GPT:
    model = GPT(CONFIG).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(normal(*p.shape, seed=i) / 4)  # biases too, so that a doubled one shows
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def plan_of(model: GPT, tp: TensorParallel) -> Plan:
    optimizer = torch.optim.SGD(model.parameters())
    return tp.around(Plan(module=model, optimizer=optimizer, parameters=dict(model.named_parameters())))


def gpt_gradients(*, sequence_parallel: bool, remat: str = "none") -> tuple[torch.Tensor, dict]:
    model = make_gpt()
    tp = tensor_parallel(model, axis(), sequence_parallel=sequence_parallel)
    apply_remat(model.blocks, remat)
    plan = plan_of(model, tp)
    for _ in range(2):  # accumulated
        _, loss = model(*batch())
        (loss / 2).backward()
    plan.finish_gradient_synchronization()
    return loss.detach(), dict(plan.full(plan.gradients()))


def case_gpt_from_outside(rank: Rank) -> None:
    whole = make_gpt()
    _, loss = whole(*batch())
    loss.backward()
    for sequence_parallel in (False, True):
        for remat in ("none", "dots", "full"):
            got_loss, gradients = gpt_gradients(sequence_parallel=sequence_parallel, remat=remat)
            close(got_loss, loss.detach())
            assert list(gradients) == [name for name, _ in whole.named_parameters()]
            for name, expected in whole.named_parameters():
                close(gradients[name], expected.grad, msg=lambda text, name=name: f"{name}: {text}")


def case_the_oracle_would_see_mistakes(rank: Rank) -> None:
    whole = make_gpt()
    _, loss = whole(*batch())
    loss.backward()
    with patch.object(conjugates, "_all_reduce", conjugates._same):
        wrong_loss, _ = gpt_gradients(sequence_parallel=False)
    assert abs(wrong_loss - loss).item() > 1e-3
    with patch("torchpar.manual.tensor_parallel.synchronize_replicated_gradients"):
        right_loss, gradients = gpt_gradients(sequence_parallel=True)
    close(right_loss, loss.detach())
    name = "transformer.ln_f.weight"
    assert (gradients[name] - whole.get_parameter(name).grad).abs().max() > 1e-3


def case_ledger_is_the_closed_form(rank: Rank) -> None:
    layers, stream = CONFIG.n_layer, 2 * 8 * CONFIG.n_embd * 8  # bytes of (B, T, C) in float64
    parts = 3 * RANKS * 2 * 8 * 8  # maximum, sum and target logit of every token and rank
    for sequence_parallel in (False, True):
        model, line = make_gpt(), axis()
        tp = tensor_parallel(model, line, sequence_parallel=sequence_parallel)
        line.traffic.clear()
        model(*batch())[1].backward()
        plan_of(model, tp).finish_gradient_synchronization()
        calls = line.traffic.calls
        assert calls[Call("all_gather", "world", "loss")] == 1
        assert line.traffic.bytes[Call("all_gather", "world", "loss")] == parts
        reduces, gathers = ("reduce_scatter", "all_gather") if sequence_parallel else ("all_reduce", None)
        for purpose in ("activations", "activation gradients"):
            # 2 a layer; forward also the embedding, backward also the head
            assert calls[Call(reduces, "world", purpose)] == 2 * layers + 1
            assert line.traffic.bytes[Call(reduces, "world", purpose)] == (2 * layers + 1) * stream
            if gathers:
                assert calls[Call(gathers, "world", purpose)] == 2 * layers + 1
        assert calls[Call("all_reduce", "world", "replicated gradients")] == int(sequence_parallel)


def case_gpt_without_targets_is_refused(rank: Rank) -> None:
    model = make_gpt()
    tensor_parallel(model, axis())
    with pytest.raises(ValueError, match="needs targets"):
        model(batch()[0])


def case_what_does_not_divide_names_both_numbers(rank: Rank) -> None:
    with pytest.raises(ValueError, match="= 4 does not divide the 6 features"):
        RowParallelLinear.from_linear(nn.Linear(6, 8), axis())
    with pytest.raises(ValueError, match="= 4 x groups = 3 does not divide the 18 features"):
        ColumnParallelLinear.from_linear(nn.Linear(8, 18), axis(), groups=3)
    with pytest.raises(ValueError, match=r"= 4 does not divide dim 1 of a tensor \(2, 6\)"):
        scatter_to(torch.zeros(2, 6), axis(), dim=1)
    with pytest.raises(ValueError, match=r"nowhere.* matches no submodule of Net"):
        swap(Net(), {"nowhere.*": lambda old: old})
    with pytest.raises(ValueError, match="padding_idx"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(8, 2, padding_idx=0), axis())


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


def run_cases(rank: Rank) -> None:
    torch.set_num_threads(1)
    collectives.join_group(
        rank=rank.rank,
        world_size=RANKS,
        device=torch.device("cpu"),
        rendezvous=rank.rendezvous,
        timeout_s=60,
    )
    for case in CASES:
        case(rank)
        Axis.of(None).all_reduce(torch.zeros(1))  # in step, so that a failure is one case's own
        if rank.rank == 0:
            print(case.__name__, flush=True)
    collectives.leave_group()


def test_tensor_parallel_on_four_ranks(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [case.__name__ for case in CASES]


if __name__ == "__main__":
    bind_to_loopback()
    launch(run_cases, world_size=RANKS, folder=Path(sys.argv[1]), timeout_s=60)
