"""Tensor parallelism by hand, on four gloo ranks, in float64: functions, vocabulary and a GPT.

The reference is the same module on one rank. Shapes: B batch, T sequence, C channels.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchpar
from tests.support.gpt_steps import CONFIG, batches, make_gpt
from tests.support.ranks import RANKS, axis, normal, on_ranks
from torchpar.compiler.data_parallel import synchronize_gradients
from torchpar.engine import Engine
from torchpar.manual.tensor_parallel import (
    ColumnParallelLinear,
    CopyToRegion,
    GatherSequence,
    ReduceFromRegion,
    ScatterSequence,
    split_layers,
)
from torchpar.manual.vocab_parallel import (
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    split_vocabulary,
)
from torchpar.model import GPT
from torchpar.remat import apply_remat

# Sums in another order than one device's: a few units in the last place, of numbers of order 1.
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


def share(whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    """The rank's chunk of a tensor along `dim`."""
    return whole.chunk(RANKS, dim)[rank]


@on_ranks
def test_each_function_and_its_backward(rank: int) -> None:
    mine, weight = normal(3, 8, seed=rank), normal(3, 8, seed=9)
    total = sum(normal(3, 8, seed=r) for r in range(RANKS))
    joined = torch.cat([normal(3, 8, seed=r) for r in range(RANKS)], 1)
    wide, narrow = normal(3, 8 * RANKS, seed=9), share(weight, rank, 1)
    for function, value, cotangent, gradient in (
        (CopyToRegion, mine, weight, RANKS * weight),
        (ReduceFromRegion, total, weight, weight),
        (GatherSequence, joined, wide, RANKS * share(wide, rank, 1)),
        (ScatterSequence, share(total, rank, 1), narrow, weight),
    ):
        leaf = mine.clone().requires_grad_()
        output = function.apply(leaf, axis())
        (output * cotangent).sum().backward()
        close(output, value)
        close(leaf.grad, gradient)


@on_ranks
def test_embedding_and_loss_of_uneven_vocabulary(rank: int) -> None:
    for vocab in (10, 5, 2, 8):  # with 5 and 2 some ranks have only padding
        ids = torch.arange(14).remainder(vocab).view(2, 7)
        targets = ids.roll(1).flatten()
        whole = nn.Embedding(vocab, 4, dtype=torch.float64)
        with torch.no_grad():
            whole.weight.copy_(normal(vocab, 4))
        split = VocabParallelEmbedding(copy.deepcopy(whole), axis(), sequence_parallel=False)
        linear = nn.Linear(4, vocab, bias=False, dtype=torch.float64)
        head = ColumnParallelLinear(linear, axis(), sequence_parallel=False)
        head.weight = split.weight
        assert torch.equal(whole(ids), split(ids))
        loss = F.cross_entropy(whole(ids).flatten(0, 1) @ whole.weight.t(), targets)
        loss2 = VocabParallelCrossEntropy(axis(), vocab_size=vocab)(head(split(ids).flatten(0, 1)), targets)
        close(loss2, loss)
        loss.square().backward()
        loss2.square().backward()
        close(split.split.gather(split.weight.grad, axis()), whole.weight.grad)
        assert not split.weight.grad[max(vocab - rank * len(split.weight), 0) :].any()  # padding


@on_ranks
def test_loss_of_extreme_and_16_bit_logits(rank: int) -> None:
    logits, targets = 1e4 * normal(6, 8), torch.arange(6)
    cross_entropy = VocabParallelCrossEntropy(axis(), vocab_size=8)
    close(cross_entropy(share(logits, rank, 1), targets), F.cross_entropy(logits, targets))
    leaf = share(normal(6, 8), rank, 1).bfloat16().requires_grad_()
    loss = cross_entropy(leaf, targets)
    loss.backward()
    assert (loss.dtype, leaf.grad.dtype) == (torch.float32, torch.bfloat16)
    reference = torch.cat([share(normal(6, 8), r, 1).bfloat16().float() for r in range(RANKS)], 1)
    close(loss, F.cross_entropy(reference, targets), rtol=1e-6, atol=1e-6)


def batch() -> tuple[torch.Tensor, ...]:
    return tuple(tokens[0] for tokens in batches(1))


class OtherCore(nn.Module):
    """Another attention core."""

    def forward(self, q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
        assert q_BTHD.shape[2] == CONFIG.n_head // RANKS
        heads = (x_BTHD.transpose(1, 2) for x_BTHD in (q_BTHD, k_BTHD, v_BTHD))
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def with_core(model: GPT, core: nn.Module) -> GPT:
    for block in model.blocks:
        block.set_submodule("attn.core", core)
    return model


def whole_gradients() -> dict[str, torch.Tensor]:
    model = make_gpt()
    _, loss = model(*batch())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def split(model: GPT, *, sequence_parallel: bool) -> Engine:
    shardings = [
        split_part(model, axis(), sequence_parallel=sequence_parallel)
        for split_part in (split_layers, split_vocabulary)
    ]
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters())
    engine = Engine(module=model, optimizer=optimizer, parameters=parameters)
    for sharding in shardings:
        engine = engine.with_sharding(sharding)
    return engine


def split_gradients(model: GPT, *, sequence_parallel: bool, remat: str = "none") -> dict[str, torch.Tensor]:
    engine = split(model, sequence_parallel=sequence_parallel)
    apply_remat(model.blocks, remat)
    for _ in range(2):  # accumulated
        _, loss = model(*batch())
        (loss / 2).backward()
    engine.finish_gradients()
    return {"loss": loss.detach()} | dict(engine.gather(engine.gradients()))


@on_ranks
def test_tp_gpt_equals_one_device(rank: int) -> None:
    """With and without another attention core, which has this rank's heads."""
    expected = whole_gradients()
    for sequence_parallel in (False, True):
        for remat in ("none", "dots", "full"):
            for model in (make_gpt(), with_core(make_gpt(), OtherCore())):
                got = split_gradients(model, sequence_parallel=sequence_parallel, remat=remat)
                assert list(got) == list(expected)
                for name, tensor in expected.items():
                    close(got[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def test_dtensor_sums_over_tp_before_data():
    """A gradient that is partial along three axes; one of eight ranks runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        devices = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("tp", "dp_replicate", "cp"))
        devices["dp_replicate", "cp"]._flatten("dp_replicate+cp")
        gradient = DTensor.from_local(torch.ones(4), devices, [Partial()] * 3)
        with torchpar.ledger() as ledger:
            synchronize_gradients(gradient, (Replicate(),) * 3)
    finally:
        dist.destroy_process_group()
    assert sorted((row.axis, row.calls) for row in ledger.rows) == [("dp_replicate+cp", 1), ("tp", 1)]
