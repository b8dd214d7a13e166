"""A check that an optimizer treats elements one by one, as one that updates pieces of tensors must.

It is tried: a few steps on a small matrix, and the same on two cuts of it, each a vector with an optimizer of
its own, as two ranks would have them. What Adafactor, Muon, LBFGS, Shampoo or LAMB make of a row, a matrix or
a norm differs there. Not noticed is what an optimizer does only later, or with larger tensors.
"""

import functools
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchpar.comm.untraced import untraced
from torchpar.guards.claims import claimant_of
from torchpar.guards.flat_steps import FlatSteps

STEPS = 4
ROWS, COLUMNS, CUT = 65, 64, 2500
# float32 keeps 7 digits; what is computed from other rows or norms is off by more than a percent.
TOLERANCE = 1e-3

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def require_elementwise(
    make: MakeOptimizer, options: Mapping[str, Any], *, name: str, device: torch.device
) -> None:
    """Try an optimizer on a matrix and on two cuts of it.

    Args:
        make: the optimizer from param groups.
        options: of a group, such as weight_decay; the learning rate is replaced by one that shows.
        name: the optimizer's, for the messages.
        device: where to try it.

    Raises:
        ValueError: the results differ. Where that cannot be told, a UserWarning says why.
    """
    group = {**options, "lr": 1e-2} if "lr" in options else dict(options)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        difference, doubt = _compare(make, group, device)
    if doubt:
        what = f"whether {name} treats elements one by one, as it must on pieces of tensors, cannot be tried"
        warnings.warn(f"{what}: {doubt}", stacklevel=3)
    if difference:
        raise ValueError(
            f"{name} does not treat elements one by one, and would compute something else on pieces of "
            f"tensors: use one that does (SGD, Adam, ...), or DataParallel, which keeps parameters whole "
            f"({difference})"
        )


def _compare(make: MakeOptimizer, group: Mapping[str, Any], device: torch.device) -> tuple[str, str]:
    """Differences between a matrix and cuts of it, and why that cannot be told; both "" if all is well."""
    try:
        whole = _after_steps(make, group, [slice(None)], device)
    except Exception as error:  # whatever somebody's optimizer may raise
        return "", f"on a matrix it raises {type(error).__name__}: {error}"
    moved = _distance(whole, _start(device))
    if not 0 < moved < float("inf"):
        return "", f"in {STEPS} steps it moves a matrix by {moved}"
    try:
        cut = _after_steps(make, group, [slice(None, CUT), slice(CUT, None)], device)
    except Exception as error:
        return f"{type(error).__name__}: {error}", ""
    off = _distance(whole, cut) / moved
    if off <= TOLERANCE:
        return "", ""
    if _distance(whole, _after_steps(make, group, [slice(None)], device)) > TOLERANCE * moved:
        return "", "it is random"
    return f"on a matrix and on two cuts of one it differs by {off:.1%}", ""


@functools.cache
def watch_optimizers() -> None:
    """From now on, the first step of any torch Optimizer that has pieces of an FSDP tries it first."""
    register_optimizer_step_pre_hook(_before_step)


_tried: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # groups of each


@untraced
def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    groups = optimizer.param_groups
    if _tried.get(optimizer) == len(groups):
        return
    for group in groups[_tried.get(optimizer, 0) :]:
        pieces = [p for p in group["params"] if isinstance(claimant_of(p), FlatSteps)]
        if pieces:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            make, name = _maker(optimizer), type(optimizer).__name__
            require_elementwise(make, options, name=name, device=pieces[0].device)
    _tried[optimizer] = len(groups)


def _maker(optimizer: torch.optim.Optimizer) -> MakeOptimizer:
    """The optimizer's class with what it was made with, as far as its defaults say."""
    kind = type(optimizer)
    names = [*inspect.signature(kind.__init__).parameters][2:]
    kwargs = {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}
    return lambda groups: kind(groups, **kwargs)


def _start(device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * COLUMNS, device=device).sin().view(ROWS, COLUMNS)


def _after_steps(
    make: MakeOptimizer, options: Mapping[str, Any], cuts: list[slice], device: torch.device
) -> torch.Tensor:
    """The matrix after some steps: whole (one cut of everything), or cut, each part with an optimizer."""
    phase = torch.linspace(1, 99, ROWS * COLUMNS, device=device).view(ROWS, COLUMNS)
    results = []
    for cut in cuts:
        is_whole = cut == slice(None)
        part, turn = (t if is_whole else t.flatten()[cut] for t in (_start(device), phase))
        parameter, calls = nn.Parameter(part.clone()), itertools.count(1)

        def closure(parameter=parameter, turn=turn, calls=calls) -> float:
            parameter.grad = (turn * next(calls)).cos()  # leads nowhere, where all would agree
            return parameter.grad.square().sum().item()

        optimizer = make([{**options, "params": [parameter]}])
        for _ in range(STEPS):
            optimizer.step(closure)
        results.append(parameter.detach().flatten())
    return torch.cat(results).view(ROWS, COLUMNS)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().nan_to_num(nan=torch.inf).item()
