"""Context parallelism by hand, on four gloo ranks, in float64: attention, a GPT, bytes and hops.

The oracles are PyTorch's `scaled_dot_product_attention` over whole sequences, and the same GPT on one rank.
"""

import gc
import weakref
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from compare.contract.communication import LOSS
from compare.numerics.context import order_of_positions
from compare.spec.experiment import Layout, Model, Precision, Train
from compare.theory.communication import bytes_sent
from compare.theory.ring import orders_of_ring
from tests.support.gpt_steps import (
    ADAM,
    assert_same,
    backward,
    make_gpt,
    make_parallel,
    reference,
    train,
    update,
)
from tests.support.ranks import RANKS, axis, counted, normal, on_ranks
from torchpar import manual
from torchpar.comm.collectives import DONE, Axis
from torchpar.manual import context_parallel, ring
from torchpar.measure.watch import Watch
from torchpar.measure.work import WorkSink
from torchpar.model import CausalAttention

WAYS = {
    "allgather": Layout(cp=RANKS),
    "allgather, zigzag": Layout(cp=RANKS, zigzag=True),
    "ring": Layout(cp=RANKS, context="ring"),
    "ring, zigzag": Layout(cp=RANKS, context="ring", zigzag=True),
    "ulysses": Layout(cp=RANKS, context="ulysses"),
}
GPTS = WAYS | {
    "full": replace(WAYS["ring, zigzag"], remat="full"),
    "dots": replace(WAYS["ring"], remat="dots"),
    "ddp": Layout(cp=2, dp_replicate=2, context="ring", zigzag=True, gradient_sync="overlapped"),
    "zero1": Layout(cp=2, dp_shard=2, zero=1, zigzag=True, remat="full"),
    "fsdp": Layout(cp=2, dp_shard=2, zero=3, context="ulysses", remat="dots"),
    "tp": Layout(cp=2, tp=2, context="ulysses"),
    "tp_sp": Layout(cp=2, tp=2, sequence_parallel=True, context="ring", zigzag=True),
}
STEP = Train(batch_size=4, gradient_accumulation_steps=2)
close = partial(torch.testing.assert_close, rtol=1e-13)


def attention(layout: Layout, rank: int, *whole: torch.Tensor) -> list[torch.Tensor]:
    """This rank's y, dq, dk and dv, from q, k, v and dy (B, T, H, D) of whole sequences."""
    core = CausalAttention(Model(), 1)
    way = context_parallel.CORES[layout.context](core, axis(), layout, context_parallel.causal_mask)
    *q_k_v, dy = (local_positions(x, layout, rank) for x in whole)
    leaves = [x.clone().requires_grad_() for x in q_k_v]
    y = way(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def local_positions(x_BTHD: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    return x_BTHD[:, torch.tensor(order_of_positions(x_BTHD.shape[1], layout)).chunk(RANKS)[rank]]


@on_ranks
def test_attention_equals_whole_sequences(rank: int) -> None:
    """With grouped queries, with large scores, and approximately in bfloat16."""
    for kv_heads, scale in ((8, 1.0), (4, 1.0), (4, 30.0)):
        whole = [normal(2, 24, heads, 3, seed=heads) for heads in (8, kv_heads, kv_heads, 8)]
        whole[0] = scale * whole[0]
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        heads_first = (x.transpose(1, 2) for x in leaves)
        y = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
        y.backward(whole[3])
        expected = [y.detach(), *(leaf.grad for leaf in leaves)]
        for name, layout in WAYS.items():
            got = attention(layout, rank, *whole)
            narrow = attention(layout, rank, *(x.bfloat16() for x in whole)) if scale == 1.0 else []
            for what, right in enumerate(expected):
                said = partial("{1}, {2}: {0}".format, what, name)
                close(got[what], local_positions(right, layout, rank), msg=said, atol=1e-13 * scale)
                if narrow:
                    assert narrow[what].dtype == torch.bfloat16
                    assert (narrow[what] - got[what]).norm() < 0.05 * got[what].norm(), (what, name)


@on_ranks
def test_masks_end_with_the_model(rank: int) -> None:
    """A rank with two chunks makes two masks for all its layers, and nothing keeps them after the model."""
    made, layout = [], WAYS["allgather, zigzag"]

    def noted(*sizes: Any, make: Any = context_parallel.causal_mask) -> torch.Tensor:
        mask = make(*sizes)
        made.append(weakref.ref(mask))
        return mask

    with patch.object(context_parallel, "causal_mask", noted):
        model, ids_Bt = make_gpt(), torch.arange(4).view(2, 2)
        context_parallel.split_sequence(model, axis(), layout, torch.device("cpu"))
        for _ in range(2):
            model(ids_Bt, ids_Bt)[1].backward()
    assert [mask() is None for mask in made] == [False, False]
    del model
    gc.collect()
    assert [mask() is None for mask in made] == [True, True]


def test_mask_of_a_gpu():
    """It hides the same keys, without memory. Float64 has no kernel that needs no mask."""
    from torch.nn.attention.bias import CausalBias  # seconds of imports

    on_gpu, on_cpu = (torch.device(name) for name in ("cuda", "cpu"))
    for size in ((3, 3), (2, 6)):
        hidden = context_parallel.causal_mask(*size, torch.bfloat16, on_cpu) != 0
        bias = context_parallel.causal_mask(*size, torch.bfloat16, on_gpu)
        assert isinstance(bias, CausalBias)
        assert bias._materialize().equal(~hidden)
        with FakeTensorMode():
            mask = context_parallel.causal_mask(*size, torch.float64, on_gpu)
        assert not isinstance(mask, CausalBias)


@on_ranks
def test_ring_hops_overlap_blocks(rank: int) -> None:
    """h is a hop, f and b are a block forward and backward. With zigzag all ranks have as many blocks."""
    whole, done = [normal(1, 16, 2, 3, seed=seed) for seed in range(4)], list[str]()

    def noted(letter: str, owner: object, name: str) -> AbstractContextManager:
        right = getattr(owner, name)
        return patch.object(owner, name, lambda *args, **how: done.append(letter) or right(*args, **how))

    of_module = (("f", "attend"), ("b", "attend_backward"))
    with ExitStack() as stack:
        for place in (("h", Axis, "start_shift"), *((c, ring, name) for c, name in of_module)):
            stack.enter_context(noted(*place))
        for name, blocks in (
            ("ring", [int(k <= rank) for k in range(RANKS)]),
            ("ring, zigzag", [3, 2, 2, 2]),
        ):
            done.clear()
            attention(WAYS[name], rank, *whole)
            hops = [*"h" * (RANKS - 1), ""]
            forward = [hop + "f" * count for hop, count in zip(hops, blocks, strict=True)]
            backward = [hop + "b" * count + "h" for hop, count in zip(hops, blocks, strict=True)]
            assert "".join(done) == "".join(forward + backward), name


@on_ranks
def test_ring_order_is_observed(rank: int) -> None:
    """A ring that waits for each hop has another order, and so has a ring with a block after its hops."""
    layout = replace(WAYS["ring"], remat="full")
    parallel, mesh = make_parallel(manual.make_engine, layout, rank, ADAM)
    around, waits = ring.pass_around, Axis.start_shift

    def seen() -> set[str]:
        sink = WorkSink(parallel.module)
        with Watch(sink):
            backward(parallel, mesh, 0, layout)
        return {*sink.result().rings}

    right = seen()
    assert len(right) == 2
    assert {*chain(*axis().all_gather_objects(right))} == orders_of_ring(layout)
    with patch.object(ring, "pass_around", lambda *kv_axis: [*around(*kv_axis)]):
        assert not seen() & right
    with patch.object(Axis, "start_shift", lambda *of, **how: waits(*of, **how).wait() or DONE):
        assert not seen() & right


@pytest.mark.parametrize("name", GPTS)
@on_ranks
def test_cp_gpt_equals_one_device(rank: int, name: str) -> None:
    assert_same(train(manual.make_engine, GPTS[name], rank, ADAM)[0], reference(ADAM), name)


@pytest.mark.parametrize("name", [name for name, layout in GPTS.items() if layout.tp == 1])
@on_ranks
def test_cp_sends_closed_form(rank: int, name: str) -> None:
    """tp does not divide the vocabulary, and the closed form requires it."""
    layout = GPTS[name]
    parallel, mesh = make_parallel(manual.make_engine, layout, rank, ADAM)
    for step in range(2):
        with counted() as counts:
            backward(parallel, mesh, step, layout)
            update(parallel, ADAM.optimizer, step)
    sent = {tuple(call): size for call, size in counts.items()}
    experiment = replace(ADAM, layout=layout, train=STEP, precision=Precision(dtype="float64"))
    for item, size in bytes_sent("torch-manual", experiment).items():
        if item[2] != LOSS:
            assert sent.pop(item) == pytest.approx(size, rel=0.01 * (layout.zero > 0)), item
    assert all(size <= 8 for size in sent.values()), sent
