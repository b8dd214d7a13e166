"""Optimizers that may update pieces of tensors: tried, and said on all ranks, before anything is updated."""

import warnings
from functools import partial

import pytest
import torch
from modules import Odd, ids, share
from ranks import axis, on_ranks

from torchpar import FSDP, ShardedOptimizer
from torchpar.guards.elementwise import require_elementwise

CPU = torch.device("cpu")
REFUSED = [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon]
SENTENCE = "{} does not treat elements one by one, .* use one that does .*, or DataParallel"


def attempt(make, **options) -> None:
    require_elementwise(make, options, name="Mine", device=CPU)


class Step(torch.optim.Optimizer):
    """SGD, but for what a subclass does to the gradient."""

    def __init__(self, params, lr: float = 0.1, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * self.direction(p.grad)

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Trust(Step):
    """By the norm of a tensor, as LARS and LAMB."""

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class Rows(Step):
    """By the dims of a tensor, as Shampoo."""

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.square().mean(-1, keepdim=True).sqrt()


class Noise(Step):
    """As in Langevin dynamics."""

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class Still(Step):
    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)


class Broken(Step):
    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")


def test_every_optimizer_of_pytorch_is_judged():
    optim = torch.optim
    fine = [optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam]
    fine += [optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, Step]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in fine:
            attempt(partial(make, lr=0.0), lr=0.0)  # as in the first step of a warm-up
        attempt(partial(optim.SGD, lr=1e-9, momentum=0.9, nesterov=True), weight_decay=0.1, lr=1e-9)
        attempt(partial(optim.AdamW, fused=True, amsgrad=True))
    for make in (*REFUSED, Trust, Rows):
        with pytest.raises(ValueError, match=SENTENCE.format("Mine")):
            attempt(make, lr=0.0)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Noise, "it is random"),
        (Still, r"in 4 steps it moves a matrix by 0\.0"),
        (Broken, "on a matrix it raises RuntimeError: no such kernel"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
    ],
)
def test_what_cannot_be_tried_is_said(make, why):
    with pytest.warns(
        UserWarning, match=f"^whether Mine treats elements one by one, .* cannot be tried: .*{why}"
    ):
        attempt(make)


@on_ranks
def test_the_sharded_optimizer_refuses_at_once(rank: int) -> None:
    module = Odd()
    before = {name: p.clone() for name, p in module.named_parameters()}
    for make in REFUSED:
        with pytest.raises(ValueError, match=SENTENCE.format(make.__name__)):
            ShardedOptimizer(module.parameters(), make, lr=0.1)
    optimizer = ShardedOptimizer(module.layers.parameters(), torch.optim.SGD, lr=0.1)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    sharded = FSDP(Odd())
    with pytest.raises(ValueError, match="already synchronised by an FSDP"):
        optimizer.add_param_group({"params": list(sharded.parameters())})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1


@on_ranks
def test_fsdp_refuses_at_the_first_step(rank: int) -> None:
    model = FSDP(Odd())
    for make in (torch.optim.Adafactor, Trust):
        optimizer = make(model.parameters(), lr=0.1)
        model(share(ids(), rank)).backward()
        model.finish_gradient_synchronization()
        before = [p.clone() for p in model.parameters()]
        for _ in range(2):
            with pytest.raises(ValueError, match=SENTENCE.format(make.__name__)):
                optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert axis().all_gather_objects(len(before)) == [len(before)] * 4  # every rank is here
        model.zero_grad()
    with pytest.raises(ValueError, match="Muon"):  # by itself: pieces are no matrices
        torch.optim.Muon(model.parameters())


@on_ranks
def test_a_group_that_comes_later_is_tried_too(rank: int) -> None:
    model = FSDP(Odd())

    class Mixed(Trust):
        def direction(self, gradient: torch.Tensor) -> torch.Tensor:
            return super().direction(gradient) if self.param_groups[-1]["trusts"] else gradient

    free = torch.nn.Parameter(torch.ones(3))
    optimizer = Mixed([{"params": [free], "trusts": True}], trusts=False)
    free.grad = torch.ones(3)
    optimizer.step()  # none of our business
    optimizer.add_param_group({"params": [model.pieces["strided"]]})
    optimizer.step(lambda: model(share(ids(), rank)).backward() or model.finish_gradient_synchronization())
    optimizer.add_param_group({"params": [model.pieces["single"]], "trusts": True})
    with pytest.raises(ValueError, match=SENTENCE.format("Mixed")):
        optimizer.step()
