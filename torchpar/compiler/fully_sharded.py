"""Fully sharded data parallelism by placements: say where state rests, and DTensor moves it.

    zero   `Shard(0)` along dp_shard                         what moves
    1      what the optimizer updates                        gradients scattered once a step, parameters gathered
    2      + gradients, as they accumulate                   gradients scattered once a pass
    3      + parameters                                      gathered when a block begins, scattered by the derivative

Stage 3 is a parametrisation: a module that reads its weight reads what the shard is redistributed to. Its
derivative puts the gradient where the shard is, which is the reduce-scatter; along other axes the gradient
stays the partial sum that it is. What autograd would keep of a block's weights for backward is gathered
again there: the block is a checkpoint that saves all but that.

Source: SimpleFSDP (arXiv 2411.00284).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compare.spec.axes import DP_SHARD
from torchpar.comm.chunks import chunk_slices
from torchpar.compiler.placement import Placements, axes_of
from torchpar.model import GPT
from torchpar.remat import Remat, apply_remat

AXIS = DP_SHARD

_aten = torch.ops.aten
# What they return shares its memory with a gathered weight, or is a copy of one for autocast.
_OF_WEIGHTS = frozenset(
    {_aten.t.default, _aten.transpose.int, _aten.view.default, _aten.detach.default, _aten._to_copy.default}
)


class Gather(torch.autograd.Function):
    """A shard redistributed to whole along dp_shard, and in the derivative the gradient to where the shard is."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor) -> DTensor:
        ctx.axis = axes_of(shard.device_mesh).index(AXIS)
        ctx.at_rest = shard.placements[ctx.axis]
        return shard.redistribute(placements=_with(shard.placements, ctx.axis, Replicate()))

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> DTensor:
        (gradient,) = gradients
        return gradient.redistribute(placements=_with(gradient.placements, ctx.axis, ctx.at_rest))


class Unit:
    """Parameters that are gathered together: whole for their modules from `gather` to `free`.

    Args:
        modules: read their own parameters from here.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self.is_gathering = False
        self._whole: dict[torch.Tensor, DTensor] = {}
        self._shards = dict.fromkeys(p for module in modules for p in module.parameters(recurse=False))

    def gather(self, *_: Any) -> None:
        """Gather what is not there."""
        if not self._whole:
            self.is_gathering = True
            self._whole.update({shard: Gather.apply(shard) for shard in self._shards})
            self.is_gathering = False

    def free(self) -> None:
        """Modules see shards again."""
        self._whole.clear()

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter as its module sees it."""
        return self._whole.get(parameter, parameter)


def shard_parameters(model: GPT, *, remat: Remat, reshard_after_forward: bool) -> list[Unit]:
    """Stage 3: parametrise a model whose parameters rest as shards; blocks are gathered when they begin.

    What is in no block is gathered with the first forward of a step, and stays for its backward, where it is
    needed first.

    Args:
        model: its parameters are DTensors, split over dp_shard.
        remat: what backward computes again.
        reshard_after_forward: gather blocks again for backward; else they stay until the end of the step.

    Returns:
        What is to be freed at the end of a step, and of an evaluation.
    """
    root = parametrise(module for name, module in model.named_modules() if not name.startswith("transformer.h."))
    model.register_forward_pre_hook(root.gather)
    units = [parametrise(block.modules()) for block in model.blocks]
    if not reshard_after_forward:
        apply_remat(model.blocks, remat)
    for block, unit in zip(model.blocks, units, strict=True):
        block.forward = whole_within(unit, block.forward, frees=reshard_after_forward)
        if reshard_after_forward and remat == "none":
            block.forward = gathered_again(unit, block.forward)
    if reshard_after_forward:
        apply_remat(model.blocks, remat)
    return [root, *units]


def parametrise(modules: Iterable[nn.Module]) -> Unit:
    """A unit of some modules' own parameters, which these read from it; names of parameters stay."""
    modules = list(modules)
    unit = Unit(modules)

    def reader(name: str) -> property:
        return property(lambda module: unit.read(module._parameters[name]))

    for module in modules:
        if own := [name for name, p in module._parameters.items() if p is not None]:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {name: reader(name) for name in own})
    return unit


def whole_within(unit: Unit, forward: Callable[..., Any], *, frees: bool) -> Callable[..., Any]:
    """The forward of modules whose parameters are whole while it runs."""

    def run(*arguments: Any) -> Any:
        unit.gather()
        try:
            return forward(*arguments)
        finally:
            if frees:
                unit.free()

    return run


def gathered_again(unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of which backward gathers the weights again, and computes nothing again."""

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        again = unit.is_gathering or operator in _OF_WEIGHTS
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def shards_of(parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Placements]) -> dict[str, nn.Parameter]:
    """Stages 1 and 2: the rows of each parameter that this rank updates, in the memory of the whole one."""
    shards = {}
    for name, parameter in parameters.items():
        whole = parameter.detach()
        assert isinstance(whole, DTensor)
        devices, rows = whole.device_mesh, whole.to_local()
        own = chunk_slices(len(rows), devices[AXIS].size())[devices.get_local_rank(AXIS)]
        shard = DTensor.from_local(
            rows[own], devices, placements[name], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        shards[name] = nn.Parameter(shard)
    return shards


def scatter(gradient: DTensor, *, placements: Placements) -> DTensor:
    """Stage 2: a pass's gradient, where the shard is; along other axes it stays as it is."""
    axis = axes_of(gradient.device_mesh).index(AXIS)
    return gradient.redistribute(placements=_with(gradient.placements, axis, placements[axis]))


@torch.no_grad()
def gather_parameters(parameters: Mapping[str, nn.Parameter], shards: Mapping[str, nn.Parameter]) -> None:
    """Stages 1 and 2: make parameters whole again after an update of their shards."""
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        parameter.copy_(shards[name].redistribute(placements=parameter.placements))


def _with(placements: Placements, axis: int, one: Any) -> Placements:
    return *placements[:axis], one, *placements[axis + 1 :]
