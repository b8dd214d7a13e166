"""Fully sharded data parallelism by placements: say where state rests, and DTensor moves it.

    zero   `Shard(0)` along dp_shard              what moves
    1      what the optimizer updates             gradients scattered once a step, parameters gathered
    2      + gradients, as they accumulate        gradients scattered once a pass
    3      + parameters                           gathered where they are read, scattered by the derivative

Stage 3 is a parametrisation: a module that reads its weight reads what the shard is redistributed to. Its
derivative puts the gradient where the shard is, which is the reduce-scatter; along other axes the gradient
stays the partial sum that it is. What autograd would keep of a block's weights for backward is gathered
again there: the block is a checkpoint that saves all but that. What is in no block is read twice, for it is
tied: it is gathered with the first forward of a step, and stays for its backward, where it is needed first.

Source: SimpleFSDP (arXiv 2411.00284).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compare.spec.axes import EP
from compare.spec.experiment import Layout
from torchpar.comm.collectives import chunk_slices
from torchpar.compiler.placement import shard_axis
from torchpar.dtensors import Placements, axis_names, local_part
from torchpar.mlp import Weight
from torchpar.model import GPT
from torchpar.remat import NO_REMAT, apply_remat

_aten = torch.ops.aten
_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
# What these return is gathered weights, or shares memory with them, or is a copy of them for autocast.
_OF_WEIGHTS = frozenset(
    {
        torch.ops._c10d_functional.wait_tensor.default,
        *(_aten.t.default, _aten.transpose.int, _aten.view.default, _aten.slice.Tensor, _aten.detach.default),
        _aten.unbind.int,
        _aten._to_copy.default,
    }
)


class Gather(torch.autograd.Function):
    """A shard redistributed to whole along dp_shard; its derivative, the gradient to where the shard is."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor) -> DTensor:
        ctx.at_rest = shard.placements
        return moved(shard, [Replicate()] * len(ctx.at_rest))

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> DTensor:
        return moved(gradients[0], ctx.at_rest)


def moved(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A tensor as placed along dp_shard, and along other axes as it is: perhaps a partial sum."""
    axis, now = axis_names(x.device_mesh).index(shard_axis(x.device_mesh)), x.placements
    return x.redistribute(placements=[*now[:axis], placements[axis], *now[axis + 1 :]])


class Kept:
    """Parameters that are whole from the first forward of a step to its end: modules read theirs here."""

    def __init__(self, modules: Iterable[nn.Module]):
        modules = list(modules)
        self._whole: dict[torch.Tensor, DTensor] = {}
        self._shards = dict.fromkeys(p for module in modules for p in module.parameters(recurse=False))
        for module in modules:
            parametrise(module, lambda shard: self._whole.get(shard, shard))

    def gather(self, *_: Any) -> None:
        """Gather what is not there."""
        if not self._whole:
            self._whole.update({shard: Gather.apply(shard) for shard in self._shards})

    def free(self) -> None:
        """Modules see shards again."""
        self._whole.clear()


def stays_where_it_is(module: nn.Module, axis: str) -> bool:
    """Whether a module has the weights (E, ..) of experts, which ep splits, and nothing gathers."""
    return axis == EP and isinstance(module, Weight) and module.weight.ndim > 2


def shard_parameters(model: GPT, devices: DeviceMesh, layout: Layout) -> Kept:
    """Stage 3: parametrise a model whose parameters rest as shards.

    Blocks are gathered in forward and again in backward, or with all else kept whole. Returns the kept ones,
    to be freed at the end of a step, and of an evaluation.
    """
    reshards = layout.reshard_after_forward
    modules = [module for module in model.modules() if not stays_where_it_is(module, shard_axis(devices))]
    of_blocks = [module for block in model.blocks for module in block.modules()] if reshards else []
    of_blocks = [module for module in of_blocks if module in modules]
    kept = Kept(module for module in modules if module not in of_blocks)
    model.register_forward_pre_hook(kept.gather)
    for module in of_blocks:
        parametrise(module, Gather.apply)
    for block in model.blocks:
        if reshards and layout.remat in NO_REMAT:
            block.forward = gathered_again(block.forward, devices)
    apply_remat(model.blocks, layout.remat)
    return kept


def parametrise(module: nn.Module, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Let a module see each of its own parameters as `read` gives it; their names stay."""

    def reader(name: str) -> property:
        return property(lambda module: read(module._parameters[name]))

    if own := [name for name, parameter in module._parameters.items() if parameter is not None]:
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {name: reader(name) for name in own})


def gathered_again(forward: Callable[..., Any], devices: DeviceMesh) -> Callable[..., Any]:
    """A forward of which backward gathers the weights again, and computes nothing again."""
    group = devices[shard_axis(devices)].get_group().group_name

    def policy(context: Any, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        of_weights = operator in _OF_WEIGHTS or (operator is _gather and arguments[2] == group)
        # Dropout's bits are made in place, and what changes in place cannot be saved.
        of_bits = any(isinstance(x, torch.Tensor) and not x.is_floating_point() for x in arguments[:2])
        return CheckpointPolicy.PREFER_RECOMPUTE if of_weights or of_bits else CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def shards_of(
    parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Placements]
) -> dict[str, nn.Parameter]:
    """Stages 1 and 2: the rows of each parameter that this rank updates, in the memory of the whole one."""
    shards = {}
    for name, parameter in parameters.items():
        whole = parameter.detach()
        assert isinstance(whole, DTensor)
        devices, rows = whole.device_mesh, whole.to_local()
        own = rows
        if whole.placements != placements[name]:
            axis = shard_axis(devices)
            own = rows[chunk_slices(len(rows), devices[axis].size())[devices.get_local_rank(axis)]]
        shards[name] = nn.Parameter(local_part(own, devices, placements[name], of=whole))
    return shards


@torch.no_grad()
def gather_parameters(parameters: Mapping[str, nn.Parameter], shards: Mapping[str, nn.Parameter]) -> None:
    """Stages 1 and 2: make parameters whole again after an update of their shards."""
    for name, parameter in parameters.items():
        shard = shards[name]
        assert isinstance(parameter, DTensor)
        assert isinstance(shard, DTensor)
        parameter.copy_(shard.redistribute(placements=parameter.placements))
