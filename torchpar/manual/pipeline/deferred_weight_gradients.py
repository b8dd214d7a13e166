"""Deferred weight gradients of linear layers, for zero-bubble schedules.

A linear layer's backward is two products. The layers before it need the one for its input at once; only the
optimizer needs the one for its weight. This takes the second out of backward, for any module,
and keeps the two factors. Everything else (norms, embeddings, attention) is differentiated as always.

N rows (all dims but the last), I input features, O output features.
Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchpar.manual.any_module.untraced import untraced


class Factors(NamedTuple):
    """Factors of the gradients of one linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x_NI: torch.Tensor
    gradient_NO: torch.Tensor


class DeferredWeightGradients:
    """Within `into`, parameters that a module gives to `F.linear` get no gradient in backward.

    The factors of their gradients are collected instead. `forward` of every submodule that has parameters
    is replaced on the instance, so that this holds where a checkpoint runs it again, too; outside of `into`
    the module is as ever.

    Args:
        module: any module; one that gives a parameter to F.linear inside a checkpoint of its own making
            cannot be split, and says so in backward.
    """

    def __init__(self, module: nn.Module):
        self._factors: list[Factors] | None = None
        for layer in module.modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.forward = functools.partial(self._forward, layer.forward)

    @contextmanager
    def into(self, factors: list[Factors]) -> Generator[None]:
        """Put gradients off into this list: around a forward, and around a backward that may run it again."""
        before, self._factors = self._factors, factors
        try:
            yield
        finally:
            self._factors = before

    def _forward(self, forward, *args, **kwargs):
        if self._factors is None:
            return forward(*args, **kwargs)
        with _Mode(self._factors):
            return forward(*args, **kwargs)


def accumulate(factors: list[Factors]) -> None:
    """Add the gradients put off to the parameters', and forget their factors. Hooks run as in backward."""
    while factors:
        weight, bias, x_NI, gradient_NO = factors.pop()
        parameters, gradients = [weight], [(gradient_NO.t() @ x_NI).to(weight.dtype)]
        if bias is not None and bias.requires_grad:
            parameters.append(bias)
            gradients.append(gradient_NO.sum(0).to(bias.dtype))
        torch.autograd.backward(parameters, gradients)


class _Mode(TorchFunctionMode):
    """F.linear of a trainable weight becomes `_Linear`."""

    def __init__(self, factors: list[Factors]):
        super().__init__()
        self._factors = factors

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @untraced
    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
        # A computed weight is no leaf: backward has to go on through it.
        are_leaves = all(p is None or p.is_leaf for p in (weight, bias))
        if not (torch.is_grad_enabled() and weight.requires_grad and are_leaves):
            return F.linear(input, weight, bias)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        # Without the anchor a layer on plain inputs would be no part of the graph.
        anchor = torch.empty((), requires_grad=True)
        return _Linear.apply(input, anchor, self._factors, (weight, bias))


class _Linear(torch.autograd.Function):
    """F.linear, differentiated by its input alone. Its parameters are hidden in a tuple from autograd."""

    @staticmethod
    def forward(ctx: Any, x, anchor, factors, parameters):
        weight = parameters[0].detach().to(x.dtype)
        bias = None if parameters[1] is None else parameters[1].detach().to(x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.factors, ctx.parameters = factors, parameters
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients):
        if torch.is_grad_enabled():  # create_graph=True: the part through the weight would be missing
            raise RuntimeError("a layer whose weight gradients are put off can be differentiated only once")
        x, weight = ctx.saved_tensors
        x_NI, gradient_NO = (t.reshape(-1, t.shape[-1]) for t in (x, gradients[0]))
        ctx.factors.append(Factors(*ctx.parameters, x_NI, gradient_NO))
        of_input = gradients[0] @ weight if ctx.needs_input_grad[0] else None
        return of_input, None, None, None
