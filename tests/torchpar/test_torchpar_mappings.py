"""The conjugate functions of tensor parallelism and the cuts of its tensors, on four gloo ranks."""

from functools import partial

import torch
from modules import normal, share
from ranks import RANKS, axis, on_ranks

from torchpar.manual.megatron.mappings import (
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from torchpar.manual.megatron.split import Split

# Sums in another order than one device's: a few units in the last place, of numbers of order 1.
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


@on_ranks
def test_each_function_and_its_backward(rank: int) -> None:
    mine, weight = normal(3, 8, seed=rank), normal(3, 8, seed=9)
    total = sum(normal(3, 8, seed=r) for r in range(RANKS))
    joined = torch.cat([normal(3, 8, seed=r) for r in range(RANKS)], 1)
    wide, narrow = normal(3, 8 * RANKS, seed=9), share(weight, rank, 1)
    for function, value, cotangent, gradient in (
        (copy_to_region, mine, weight, RANKS * weight),
        (reduce_from_region, total, weight, weight),
        (scatter_to_region, share(mine, rank, 1), narrow, weight),
        (gather_from_region, joined, wide, share(wide, rank, 1)),
        (partial(all_gather_to_region, dim=1), joined, wide, RANKS * share(wide, rank, 1)),
        (partial(reduce_scatter_from_region, dim=1), share(total, rank, 1), narrow, weight),
    ):
        leaf = mine.clone().requires_grad_()
        output = function(leaf, axis())
        (output * cotangent).sum().backward()
        close(output, value)
        close(leaf.grad, gradient)


@on_ranks
def test_cuts_round_trip(rank: int) -> None:
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


@on_ranks
def test_second_derivatives(rank: int) -> None:
    """f and g around a sum over ranks, and a gather and its parts: z = (sum_r (r + 1) x^2)^2."""
    total = sum(r + 1 for r in range(RANKS))
    x = torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True)
    whole = (total * x**2).square().sum()
    (first,) = torch.autograd.grad(whole, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)

    def by_sum() -> torch.Tensor:
        return reduce_from_region((rank + 1) * copy_to_region(x, axis()) ** 2, axis())

    def by_parts() -> torch.Tensor:
        factors = torch.full((RANKS,), total / RANKS, dtype=torch.float64)
        repeated = (factors * x.unsqueeze(-1) ** 2).contiguous()
        return gather_from_region(scatter_to_region(repeated, axis()), axis()).sum(-1)

    for function in (by_sum, by_parts):
        (gradient,) = torch.autograd.grad(function().square().sum(), x, create_graph=True)
        close(gradient, first)
        close(torch.autograd.grad(gradient.sum(), x)[0], second)
