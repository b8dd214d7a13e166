"""Weights that ZeRO-3 gathers in the 16 bits of products, on four gloo ranks: fewer bytes, equal numbers."""

import pytest
import torch
from msgspec.structs import replace

from compare.spec.axes import DP_SHARD
from compare.spec.experiment import Layout, Precision, Train
from compare.theory.communication import bytes_sent
from tests.support.gpt_steps import ADAM, backward, count, make_gpt, make_parallel
from tests.support.ranks import on_ranks
from torchpar.train import MAKE_ENGINE

ZERO3 = Layout(dp_shard=4, zero=3)
CASES = [
    ("torch-manual", Layout(dp_shard=2, tp=2, zero=3)),
    ("torch-library", ZERO3),
    ("torch-compiler", ZERO3),
    ("torch-compiler", replace(ZERO3, reshard_after_forward=False)),
]


@pytest.mark.parametrize(("engine", "layout"), CASES)
@on_ranks
def test_gathers_in_16_bits_change_no_number(rank: int, engine: str, layout: Layout) -> None:
    """A product rounds its weight anyway. gloo's order of a sum depends on the place in FSDP2's buffer."""
    found, sent = [], []
    for gather in ("storage", "products"):
        mixed = replace(ADAM, precision=Precision(dtype="bfloat16", gather=gather))
        parallel, mesh = make_parallel(MAKE_ENGINE[engine], layout, rank, mixed, make_gpt().float())
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            rows = count(parallel, mesh)
            parallel.optimizer.zero_grad(set_to_none=True)
            loss = backward(parallel, mesh, 0)
        found.append({"loss": loss, **parallel.gather(parallel.gradients())})
        sent.append(rows["all_gather", "parameters"].bytes)
    (stored, rounded), (whole, half) = found, sent
    assert all(gradient.dtype == torch.float32 for gradient in rounded.values())
    for name, gradient in stored.items():
        off = 1e-6 if engine == "torch-library" else 0.0
        torch.testing.assert_close(rounded[name], gradient, rtol=off, atol=off * gradient.abs().max().item())
    train = Train(batch_size=4, gradient_accumulation_steps=2)
    expected = [
        bytes_sent(engine, replace(of, layout=layout, train=train))["all_gather", DP_SHARD, "parameters"]
        for of in (replace(mixed, precision=Precision(dtype="bfloat16")), mixed)
    ]
    # The libraries pad the vocabulary of 50, which 4 does not divide; torch-manual does not.
    off = 1e-12 if engine == "torch-manual" else 0.005
    assert half / whole == pytest.approx(expected[1] / expected[0], rel=off)
