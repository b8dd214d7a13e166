"""One stage of a pipeline: forward and backward of one microbatch at a time, backward in one task or in two.

Backward of a linear layer is two products. The layers before it need the one for its input at once; only the
optimizer needs the one for its weight. Here the second is taken out of autograd's backward. Its two factors
are kept for a task of its own, as zero-bubble schedules want it. Or the product is added to the gradients of
the microbatches before as it is made, in place of a gradient of its own that is then read, added and freed.
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


class Factors(NamedTuple):
    """Factors of the gradients of one linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x_NI: torch.Tensor
    gradient_NO: torch.Tensor


class Stage:
    """A module that takes one tensor and returns one, and the microbatches that are under way in it.

    If it `splits_backward`, weight gradients are a task of their own. A module that has several stages is
    called with the number along the model of this one, `stage`.
    """

    def __init__(self, module: nn.Module, *, splits_backward: bool, **options: Any):
        self.module, self.splits_backward = module, splits_backward
        self.number, self._options = options.get("stage", 0), options
        # By microbatch: input and output, until backward; dropping them frees the graph behind the output.
        self.activations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.factors: dict[int, list[Factors]] = {}  # of weight gradients that are put off
        self._sink: Callable[[Factors], None] | None = None
        for layer in module.modules():  # on the instance, so that it holds where a checkpoint runs it again
            if any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False)):
                layer.forward = functools.partial(self._forward_of, layer, layer.forward)

    def forward(
        self,
        microbatch: int,
        x: torch.Tensor,
        *also: torch.Tensor,
        finish: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
    ) -> torch.Tensor:
        """Run the module on one microbatch, and keep what its backward needs; nothing without gradients.

        From the output of the stage before, or the microbatch itself, (B, ...), and further inputs without
        gradients, to the output, detached: (B, ...). On the last stage `finish` makes it the loss ().
        """
        x = x.detach().requires_grad_(x.is_floating_point())
        with self._weight_gradients_of(microbatch):
            y = finish(self.module(x, *also, **self._options))
        if torch.is_grad_enabled():
            self.activations[microbatch] = x, y
        return y.detach()

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Add a microbatch's gradients to those of the parameters, and free its activations.

        From the gradient of the stage's output, None for a loss, to that of its input, None of integers.
        """
        x, y = self.activations.pop(microbatch)
        with self._weight_gradients_of(microbatch):
            torch.autograd.backward(y, gradient)
        return x.grad

    def backward_weight(self, microbatch: int) -> None:
        """Add the weight gradients that `backward` left, where they are a task of their own."""
        factors = self.factors.pop(microbatch)
        while factors:
            add_up(factors.pop())

    @contextmanager
    def _weight_gradients_of(self, microbatch: int) -> Generator[None]:
        """Around a forward, whose graph keeps the sink, and around a backward that may run it again."""
        self._sink = self.factors.setdefault(microbatch, []).append if self.splits_backward else add_up
        try:
            yield
        finally:
            self._sink = None

    def _forward_of(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._sink is None:
            return forward(*args, **kwargs)
        linear = functools.partial(_linear, self._sink, spares_hooks=not self.splits_backward)
        if type(layer) is nn.Linear:
            return linear(*args, layer.weight, layer.bias, **kwargs)
        with _Mode(linear):
            return forward(*args, **kwargs)


@torch.no_grad()
def add_up(factors: Factors) -> None:
    """Add the gradients to the parameters', the weight's as it is made. Hooks run as in backward."""
    weight, bias, x_NI, gradient_NO = factors
    if bias is not None and bias.requires_grad:
        _add(bias, gradient_NO.sum(0))
    if weight.grad is not None and weight.grad.dtype == x_NI.dtype and not _has_hooks(weight):
        weight.grad.addmm_(gradient_NO.t(), x_NI)
    else:
        _add(weight, gradient_NO.t() @ x_NI)


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if _has_hooks(parameter):
        torch.autograd.backward(parameter, gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody is to be told of a parameter's gradients, such as a data-parallel wrapper."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class _Mode(TorchFunctionMode):
    """F.linear becomes another function: for layers that call it among other things."""

    def __init__(self, linear: Callable[..., torch.Tensor]):
        super().__init__()
        self._linear = linear

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (self._linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(
    sink: Callable[[Factors], None],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    spares_hooks: bool,
) -> torch.Tensor:
    """F.linear with its weight's gradient for the sink; `spares_hooks` leaves one with hooks to autograd."""
    has_hooks = any(_has_hooks(p) for p in (weight, bias) if p is not None)
    differentiates = torch.is_grad_enabled() and input.requires_grad and weight.requires_grad
    if not differentiates or (spares_hooks and has_hooks):
        return F.linear(input, weight, bias)
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    return _Linear.apply(input, sink, (weight, bias))


class _Linear(torch.autograd.Function):
    """F.linear, differentiated by its input alone. Its parameters are hidden in a tuple from autograd."""

    @staticmethod
    def forward(ctx: Any, x, sink, parameters):
        weight = parameters[0].detach().to(x.dtype)
        bias = None if parameters[1] is None else parameters[1].detach().to(x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.parameters = sink, parameters
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients):
        x, weight = ctx.saved_tensors
        x_NI, gradient_NO = (t.reshape(-1, t.shape[-1]) for t in (x, gradients[0]))
        ctx.sink(Factors(*ctx.parameters, x_NI, gradient_NO))
        return gradients[0] @ weight, None, None
