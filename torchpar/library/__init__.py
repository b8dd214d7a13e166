"""torch-library: PyTorch's own wrappers, as a user would pick them."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel

from compare.spec.axes import CP, DATA, DP_SHARD, EP, PP, REPLICAS, SHARDS, TP
from compare.spec.experiment import Experiment
from torchpar.comm.mesh import Mesh
from torchpar.compilation import compile_blocks
from torchpar.dtensors import dtensor_optimizer, engine_of_dtensors, make_device_mesh
from torchpar.engine import Engine, Fill
from torchpar.gpt_stages import GPTStages, stages_of
from torchpar.library.context_parallel import split_sequence
from torchpar.library.data_parallel import synchronize_gradients
from torchpar.library.expert_parallel import make_expert_unit, shard_experts
from torchpar.library.fully_sharded import ShardedOptimizer, no_sync, reshard_parameters, shard_parameters
from torchpar.library.pipeline_parallel import run_stages
from torchpar.library.tensor_parallel import complete_gradients, split_layers
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.remat import apply_remat
from torchpar.sharding import Sharding


def make_engine(model: GPT, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """Parallelize the model by the layout. One device has the plain module.

    `fill` gives parameters their values once they are split; FSDP2 fills block by block. DTensors are
    replicated by FSDP2, since DistributedDataParallel requires plain parameters.
    """
    layout = experiment.layout
    if mesh[CP].size > 1:
        split_sequence(model, mesh, layout)
    experts = shard_experts(model, mesh) if mesh[EP].size > 1 else None
    devices = None
    if mesh[TP].size > 1 or layout.zero > 1:
        axes = mesh[PP], mesh.joined(*REPLICAS), mesh.joined(*SHARDS), mesh[TP]
        devices = make_device_mesh(mesh, [axis.name for axis in axes])
    if devices is not None and mesh[TP].size > 1:
        split_layers(model, devices[TP], sequence_parallel=layout.sequence_parallel)
    apply_remat(model.blocks, layout.remat)
    compiled = compile_blocks(model.blocks, layout, mesh.device)
    numbers = stages_of(layout, mesh[PP].rank) if mesh[PP].size > 1 else ()
    stages = {number: GPTStages(model, layout, [number]) for number in numbers}
    models = list(stages.values()) or [model]
    if devices is not None:
        engine = _distribute(models, devices, experiment, mesh, fill)
    else:
        for module in models:
            fill(module)
        engine = _replicate(models, experiment, mesh)
    if experts:
        engine = engine.with_sharding(experts)
    engine = run_stages(stages, engine, mesh=mesh, layout=layout) if stages else engine
    return replace(engine, compiled=compiled)


def _replicate(models: Sequence[nn.Module], experiment: Experiment, mesh: Mesh) -> Engine:
    """Full parameters on every rank: DDP, and for ZeRO-1 an optimizer that updates some of them."""
    parameters, data, layout = _named_parameters(models), mesh.joined(*DATA), experiment.layout
    if data.size == 1:
        optimizer = make_optimizer(parameters, experiment)
        return Engine(module=_join(models), optimizer=optimizer, parameters=parameters)
    wrap = partial(synchronize_gradients, bucket_size_mb=layout.bucket_mb, keeps_buckets=layout.pp > 1)
    replicas = [wrap(model, group=data.group) for model in models]
    shards, owned = mesh.joined(*SHARDS), None
    zero1 = partial(ShardedOptimizer, group=shards.group) if layout.zero else None
    optimizer = make_optimizer(parameters, experiment, wrap=zero1)
    if isinstance(optimizer, ShardedOptimizer):
        updated = {p for group in optimizer.optim.param_groups for p in group["params"]}
        owned = {name for name, p in parameters.items() if p in updated}, shards
    return Engine(
        module=_join(replicas),
        optimizer=optimizer,
        parameters=parameters,
        sharding=Sharding(owned=owned),
        no_sync=replicas[0].no_sync,  # the schedule of a pipeline synchronizes by itself
    )


def _distribute(
    models: Sequence[GPT | GPTStages], devices: DeviceMesh, experiment: Experiment, mesh: Mesh, fill: Fill
) -> Engine:
    """Parameters as DTensors: FSDP2 shards what tensor parallelism leaves to a rank."""
    layout = experiment.layout
    has_replicas, replicas, shards = mesh.joined(*DATA).size > 1, mesh.joined(*REPLICAS), mesh.joined(*SHARDS)
    data = (replicas.name, shards.name) if replicas.size > 1 else shards.name
    sharding: dict[str, Any] = {"reshard_after_forward": layout.zero == 3 and layout.reshard_after_forward}
    shard = partial(shard_parameters, mesh=devices[data], **sharding)
    if mesh[EP].size > 1:
        without_ep = (replicas.name, DP_SHARD) if replicas.size > 1 else DP_SHARD
        expert_devices = make_device_mesh(mesh, [PP, replicas.name, DP_SHARD, EP, TP])[without_ep]
        shard = partial(shard, shard_first=partial(make_expert_unit, mesh=expert_devices, **sharding))
    if experiment.gathers_in_16_bits:
        # Gradients are summed in float32, and activations keep the dtype that autocast gives them.
        dtypes = {"param_dtype": getattr(torch, experiment.precision.dtype), "reduce_dtype": torch.float32}
        shard = partial(shard, policy=MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False))
    for model in models:
        if has_replicas:
            shard(model, fill=partial(fill, model))
        fill(model)
    parameters, module = _named_parameters(models), _join(models)
    return engine_of_dtensors(
        parameters,
        mesh,
        finish=partial(complete_gradients, module),
        module=module,
        optimizer=make_optimizer(parameters, experiment, wrap=dtensor_optimizer),
        no_sync=partial(no_sync, models[0]) if has_replicas else nullcontext,
        step_context=loss_parallel if mesh[TP].size > 1 else nullcontext,
        end_evaluation=partial(reshard_parameters, module),
    )


def _named_parameters(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: parameter for model in models for name, parameter in model.named_parameters()}


def _join(modules: Sequence[nn.Module]) -> nn.Module:
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)
