"""Weight gradients of linear layers, taken out of autograd: put off, or added where they add up.

A linear layer's backward is two products. The layers before it need the one for its input at once; only the
optimizer needs the one for its weight. This takes the second out of backward, for any module. Its two factors
are kept for later, as zero-bubble schedules want it; or the product is added to the gradients of the
microbatches before it as it is made, in place of a gradient of its own that is then read, added and freed.
Everything else (norms, embeddings, attention) is differentiated as always.

N rows (all dims but the last), I input features, O output features.
Sources: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241; Megatron-LM's fused accumulation.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchpar.comm.untraced import untraced


class Factors(NamedTuple):
    """Factors of the gradients of one linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x_NI: torch.Tensor
    gradient_NO: torch.Tensor


Sink = Callable[[Factors], None]
"""What is done with the factors of a weight's gradient: `list.append`, or `add_up`."""


class WeightGradients:
    """Within `into`, parameters that a module gives to `F.linear` get no gradient from autograd.

    The factors of their gradients go into a sink. `forward` of every submodule that has parameters is
    replaced on the instance, so that this holds where a checkpoint runs it again, too; outside of `into` the
    module is as ever.

    Args:
        module: any module; one that gives a parameter to F.linear inside a checkpoint of its own making
            cannot be split, and says so in backward.
        spares_hooks: leave parameters that somebody has put a hook on to autograd, which calls it.
    """

    def __init__(self, module: nn.Module, *, spares_hooks: bool = False):
        self._sink: Sink | None = None
        self._spares_hooks = spares_hooks
        for layer in module.modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.forward = functools.partial(self._forward, layer.forward)

    @contextmanager
    def into(self, sink: Sink) -> Generator[None]:
        """Give factors to this sink: around a forward, and around a backward that may run it again."""
        before, self._sink = self._sink, sink
        try:
            yield
        finally:
            self._sink = before

    def _forward(self, forward, *args, **kwargs):
        if self._sink is None:
            return forward(*args, **kwargs)
        with _Mode(self._sink, spares_hooks=self._spares_hooks):
            return forward(*args, **kwargs)


@torch.no_grad()
def add_up(factors: Factors) -> None:
    """Add the gradients to the parameters', the weight's as it is made. Hooks run as in backward."""
    weight, bias, x_NI, gradient_NO = factors
    if bias is not None and bias.requires_grad:
        _add(bias, gradient_NO.sum(0))
    is_plain = weight.grad is not None and weight.grad.dtype == x_NI.dtype and not has_hooks(weight)
    if is_plain:
        weight.grad.addmm_(gradient_NO.t(), x_NI.conj())
    else:
        _add(weight, gradient_NO.t() @ x_NI.conj())


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if has_hooks(parameter):
        torch.autograd.backward(parameter, gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter, any shape, has hooks on its gradients, such as those of a wrapper."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class _Mode(TorchFunctionMode):
    """F.linear of a trainable weight becomes `_Linear`."""

    def __init__(self, sink: Sink, *, spares_hooks: bool):
        super().__init__()
        self._sink, self._spares_hooks = sink, spares_hooks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @untraced
    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
        # A computed weight is no leaf: backward has to go on through it.
        are_leaves = all(p is None or p.is_leaf for p in (weight, bias))
        is_matrix = weight.dim() == 2  # F.linear takes a vector, too
        if not (torch.is_grad_enabled() and weight.requires_grad and are_leaves and is_matrix):
            return F.linear(input, weight, bias)
        if self._spares_hooks and any(has_hooks(p) for p in (weight, bias) if p is not None):
            return F.linear(input, weight, bias)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        # Without the anchor a layer on plain inputs would be no part of the graph.
        anchor = torch.empty((), requires_grad=True)
        return _Linear.apply(input, anchor, self._sink, (weight, bias))


class _Linear(torch.autograd.Function):
    """F.linear, differentiated by its input alone. Its parameters are hidden in a tuple from autograd."""

    @staticmethod
    def forward(ctx: Any, x, anchor, sink, parameters):
        weight = parameters[0].detach().to(x.dtype)
        bias = None if parameters[1] is None else parameters[1].detach().to(x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.parameters = sink, parameters
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients):
        if torch.is_grad_enabled():  # create_graph=True: the part through the weight would be missing
            raise RuntimeError("a layer whose weight gradients are put off can be differentiated only once")
        x, weight = ctx.saved_tensors
        x_NI, gradient_NO = (t.reshape(-1, t.shape[-1]) for t in (x, gradients[0]))
        of_input = gradients[0] @ weight.conj() if ctx.needs_input_grad[0] else None
        ctx.sink(Factors(*ctx.parameters, x_NI, gradient_NO))
        return of_input, None, None, None
