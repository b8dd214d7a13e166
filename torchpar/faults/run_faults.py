"""Faults of the training loop, the optimizer and the weights, the same in both engines."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from msgspec import structs

from compare.contract.faults import Ignored
from compare.contract.inputs import starting_parameters
from compare.contract.request import Request
from compare.numerics.weights import Given, Weights
from compare.spec.axes import AXES, DP_SHARD
from torchpar import dropout, setup, train
from torchpar.comm.collectives import Axis
from torchpar.parallel_model import local
from torchpar.state import Run

MOVED, BY = "blocks.0.mlp.up.weight", 1e-3


def spoiled(spoil: Callable[[Run], None]) -> AbstractContextManager:
    """A run that is set up as it should be, and then spoiled."""
    set_up = train.set_up

    def wrong(*args: Any, **options: Any) -> Run:
        run = set_up(*args, **options)
        spoil(run)
        return run

    return patch.object(train, "set_up", wrong)


@contextmanager
def ignored(setting: Ignored) -> Generator[None]:
    """A setting that is not done as asked; the record repeats the request."""
    set_up, autocast = train.set_up, train.autocast

    def wrong(request: Request, *args: Any, **options: Any) -> Run:
        done = setting.edit(request.experiment)
        run = set_up(structs.replace(request, experiment=done), *args, **options)
        return replace(run, request=request)

    def wrong_products(run: Run) -> AbstractContextManager:
        done = setting.edit(run.experiment)
        return autocast(replace(run, request=structs.replace(run.request, experiment=done)))

    with patch.object(train, "set_up", wrong), patch.object(train, "autocast", wrong_products):
        yield


def skipped_last_update() -> AbstractContextManager:
    """The last step updates nothing."""

    def skip(run: Run) -> None:
        step = run.parallel.optimizer.step

        def wrong(*args: Any) -> Any:
            return step(*args) if run.state.step < run.experiment.train.max_iters - 1 else None

        object.__setattr__(run.parallel.optimizer, "step", wrong)

    return spoiled(skip)


def after_update(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> AbstractContextManager:
    """Weights become `change(before, after)` whenever the optimizer has updated them."""

    def spoil(run: Run) -> None:
        optimizer, before = run.parallel.optimizer, dict[str, torch.Tensor]()

        def keep(*optimizer_and_arguments: Any) -> None:
            before.update({name: p.detach().clone() for name, p in run.parallel.parameters.items()})

        @torch.no_grad()
        def move(*optimizer_and_arguments: Any) -> None:
            for name, parameter in run.parallel.parameters.items():
                parameter.copy_(change(before[name], parameter))

        optimizer.register_step_pre_hook(keep)
        optimizer.register_step_post_hook(move)

    return spoiled(spoil)


reversed_update = partial(after_update, lambda before, after: 2 * before - after)
"""Every update goes the other way."""
rounded_weights = partial(after_update, lambda before, after: after.bfloat16().to(after.dtype))
"""The optimizer's own weights have 8 bits."""


def moved_weight() -> AbstractContextManager:
    """One weight starts a little away."""

    def moved(*args: Any) -> Weights:
        named = dict(starting_parameters(*args))
        named[MOVED] = named[MOVED].copy()
        named[MOVED].flat[0] += BY
        return Given(named)

    return patch.object(setup, "starting_parameters", moved)


def kept_gradients() -> AbstractContextManager:
    """A step's gradients are added to those of the step before."""

    def keep(run: Run) -> None:
        run.parallel.optimizer.zero_grad = lambda set_to_none=True: None

    return spoiled(keep)


def zeroed_before_each_pass() -> AbstractContextManager:
    """`zero_grad` stands inside of the loop over the passes of a step, and not behind it."""

    def zero_inside(run: Run) -> None:
        parallel = run.parallel

        def zero(*module_and_inputs: Any) -> None:
            parallel.module.zero_grad()
            parallel.optimizer.zero_grad()

        if not parallel.run_pipeline:
            parallel.module.register_forward_pre_hook(zero)

    return spoiled(zero_inside)


def unscaled_dropout() -> AbstractContextManager:
    """Kept elements are not scaled up."""
    return patch.object(dropout, "kept_scale", lambda rate: 1.0)


def same_dropout_on_every_rank() -> AbstractContextManager:
    """Every rank takes its rows for the first ones."""

    def forget(run: Run) -> None:
        for module in run.parallel.module.modules():
            if isinstance(module, dropout.Dropout):
                module.part = 0

    return spoiled(forget)


def norm_counts_replicas_twice() -> AbstractContextManager:
    """Squares are summed over every axis, whether a parameter is spread over it or repeated."""

    def count_all(run: Run) -> None:
        axes = (run.mesh[name] for name in AXES)
        everywhere = tuple(axis for axis in axes if axis.size > 1)
        run.parallel = replace(run.parallel, sharded_over=dict.fromkeys(run.parallel.parameters, everywhere))

    return spoiled(count_all)


def wrong_optimizer_shard() -> AbstractContextManager:
    """Each rank updates its shard with the gradients of the next rank's."""

    def mix_up(run: Run) -> None:
        def before_update(*optimizer_and_arguments: Any) -> None:
            gradients = [p.grad for p in run.parallel.parameters.values() if p.grad is not None]
            take_next_ranks([local(gradient).view(-1) for gradient in gradients], run.mesh[DP_SHARD])

        run.parallel.optimizer.register_step_pre_hook(before_update)

    return spoiled(mix_up)


@torch.no_grad()
def take_next_ranks(mine: list[torch.Tensor], axis: Axis) -> None:
    """Fill these flat tensors, (n,) each, with the next rank's elements, repeated if it has too few."""
    shards = axis.all_gather_objects(torch.cat(mine))
    theirs, start = shards[(axis.rank + 1) % axis.size], 0
    for gradient in mine:
        places = torch.arange(start, start + len(gradient)) % max(len(theirs), 1)
        gradient.copy_(theirs[places] if len(theirs) else torch.zeros_like(gradient))
        start += len(gradient)
