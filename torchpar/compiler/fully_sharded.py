"""Fully sharded data parallelism by placements: state is `Shard(0)` along dp_shard, and DTensor moves it.

    zero   sharded along dp_shard                 communication
    1      the optimizer's parameters             gradients reduce-scattered, parameters gathered, once a step
    2      + gradients, as they accumulate        gradients reduce-scattered once a pass
    3      + the parameters                       gathered where they are read, scattered by the derivative

Stage 3 is a parametrization: a module that reads its weight reads the shard, redistributed to `Replicate`.
The derivative redistributes the gradient to the shard's placement, which is the reduce-scatter. Along other
axes the gradient stays a partial sum.

Autograd would save the gathered weights of each block for backward. So the block is a checkpoint that saves
all its tensors except the gathered weights: backward gathers them again and recomputes no product. The tied
weights outside of the blocks are read twice. They are gathered with the first forward of a step, and stay for
backward, which needs them first.

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
from compare.spec.experiment import Experiment
from torchpar.comm.collectives import chunk_slices
from torchpar.compiler.placement import shard_axis
from torchpar.dtensors import Placements, axis_names, from_local
from torchpar.gathered import gathered_dtype
from torchpar.mlp import BareParameter
from torchpar.model import GPT
from torchpar.remat import NO_REMAT, apply_remat

_aten = torch.ops.aten
_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
# Operators that return gathered weights, views of them, or copies for autocast.
_OF_WEIGHTS = frozenset(
    {
        torch.ops._c10d_functional.wait_tensor.default,
        *(_aten.t.default, _aten.transpose.int, _aten.view.default, _aten.slice.Tensor, _aten.detach.default),
        _aten.unbind.int,
        _aten._to_copy.default,
    }
)


class Gather(torch.autograd.Function):
    """All-gather a shard along dp_shard in forward, reduce-scatter the gradient in backward.

    With a `gathered` dtype the shard is rounded to it first. The gradient is summed in the shard's dtype.
    """

    @staticmethod
    def forward(ctx: Any, shard: DTensor, gathered: torch.dtype | None) -> DTensor:
        ctx.at_rest, ctx.dtype = shard.placements, shard.dtype
        return redistribute_shard_axis(shard.to(gathered or shard.dtype), [Replicate()] * len(ctx.at_rest))

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[DTensor, None]:
        return redistribute_shard_axis(gradients[0].to(ctx.dtype), ctx.at_rest), None


def redistribute_shard_axis(x: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
    """Redistribute x along dp_shard alone: along other axes it may stay a partial sum."""
    assert isinstance(x, DTensor)
    # From Shard to Replicate an all-gather, from Partial to Shard a reduce-scatter. Stage 1 calls it for each
    # gradient after the last backward, stage 2 in a hook on the gradient of each pass.
    axis, now = axis_names(x.device_mesh).index(shard_axis(x.device_mesh)), x.placements
    return x.redistribute(placements=[*now[:axis], placements[axis], *now[axis + 1 :]])


class GatheredForStep:
    """Parameters that stay gathered from the first forward of a step to its end; modules read them here."""

    def __init__(self, modules: Iterable[nn.Module], gather: Callable[[nn.Parameter], DTensor]):
        modules, self._gather = list(modules), gather
        self._full: dict[torch.Tensor, DTensor] = {}
        self._shards = dict.fromkeys(p for module in modules for p in module.parameters(recurse=False))
        for module in modules:
            parametrize(module, lambda shard: self._full.get(shard, shard))

    def gather(self, *_: Any) -> None:
        """Gather the parameters, unless they are gathered."""
        if not self._full:
            self._full.update({shard: self._gather(shard) for shard in self._shards})

    def free(self) -> None:
        """Free the gathered parameters: modules read shards again."""
        self._full.clear()


def shard_parameters(model: GPT, devices: DeviceMesh, experiment: Experiment) -> GatheredForStep:
    """Stage 3: parametrize a model whose parameters are shards.

    Blocks gather in forward and again in backward; without reshard_after_forward only in forward. Returns the
    parameters that stay gathered, to be freed at the end of a step and of an evaluation.
    """
    layout = experiment.layout
    dtype_of = {p: gathered_dtype(name, experiment) for name, p in model.named_parameters()}

    def gather(shard: nn.Parameter) -> DTensor:
        return Gather.apply(shard, dtype_of[shard])

    reshards = layout.reshard_after_forward
    modules = [module for module in model.modules() if not is_split_by_ep(module, devices)]
    in_blocks = [module for block in model.blocks for module in block.modules()] if reshards else []
    in_blocks = [module for module in in_blocks if module in modules]
    gathered = GatheredForStep((module for module in modules if module not in in_blocks), gather)
    model.register_forward_pre_hook(gathered.gather)
    for module in in_blocks:
        parametrize(module, gather)
    for block in model.blocks:
        if reshards and layout.remat in NO_REMAT:
            block.forward = gather_in_backward(block.forward, devices)
    apply_remat(model.blocks, layout.remat)
    return gathered


def is_split_by_ep(module: nn.Module, devices: DeviceMesh) -> bool:
    """True if a module has weights (E, ...) of experts that ep splits: they are never gathered."""
    return shard_axis(devices) == EP and isinstance(module, BareParameter) and module.weight.ndim > 2


def parametrize(module: nn.Module, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Let a module read `read(parameter)` for each of its own parameters. Their names stay."""

    def reader(name: str) -> property:
        return property(lambda module: read(module._parameters[name]))

    if names := [name for name, parameter in module._parameters.items() if parameter is not None]:
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {name: reader(name) for name in names})


def gather_in_backward(forward: Callable[..., Any], devices: DeviceMesh) -> Callable[..., Any]:
    """Wrap a forward so that its backward gathers the weights again. It recomputes only dropout's bits."""
    group = devices[shard_axis(devices)].get_group().group_name

    def policy(context: Any, operator: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
        of_weights = operator in _OF_WEIGHTS or (operator is _gather and arguments[2] == group)
        # Dropout computes its bits in place, and a tensor that changes in place cannot be saved.
        of_bits = any(isinstance(x, torch.Tensor) and not x.is_floating_point() for x in arguments[:2])
        return CheckpointPolicy.PREFER_RECOMPUTE if of_weights or of_bits else CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def shards_of(
    parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Placements]
) -> dict[str, nn.Parameter]:
    """Stages 1 and 2: the rows of each parameter that this rank updates, views of the full parameter."""
    shards = {}
    for name, parameter in parameters.items():
        full = parameter.detach()
        assert isinstance(full, DTensor)
        devices, rows = full.device_mesh, full.to_local()
        if full.placements != placements[name]:
            axis = shard_axis(devices)
            rows = rows[chunk_slices(len(rows), devices[axis].size())[devices.get_local_rank(axis)]]
        shards[name] = nn.Parameter(from_local(rows, devices, placements[name], like=full))
    return shards


@torch.no_grad()
def gather_parameters(parameters: Mapping[str, nn.Parameter], shards: Mapping[str, nn.Parameter]) -> None:
    """Stages 1 and 2: gather the parameters after an update of their shards."""
    for name, parameter in parameters.items():
        shard = shards[name]
        assert isinstance(parameter, DTensor)
        assert isinstance(shard, DTensor)
        parameter.copy_(shard.redistribute(placements=parameter.placements))
