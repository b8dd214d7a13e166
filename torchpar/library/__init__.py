"""torch-library: PyTorch's own wrappers decide, as a user would pick them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compare.contract.communication import RECORD
from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, ROWS, TP
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.comm.mesh import Mesh
from torchpar.dtensors import Placed, dtensor_optimizer, elements_by_name, make_device_mesh, spread_over
from torchpar.gpt_stages import GPTStages, Pipeline, cut_each
from torchpar.library.data_parallel import synchronize_gradients
from torchpar.library.fully_sharded import ShardedOptimizer, no_sync, reshard_parameters, shard_parameters
from torchpar.library.pipeline_parallel import run_stages
from torchpar.library.tensor_parallel import complete_gradients, split_layers
from torchpar.model import GPT
from torchpar.parallel_model import Fill, OptimizerMaker, ParallelModel, TensorsByName, keep_values
from torchpar.remat import apply_remat, resolve_remat


def parallelize(
    model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker, fill: Fill = keep_values
) -> ParallelModel:
    """The model under the layout. The order: tensor parallelism, recomputation, the cut into a pipeline's
    stages, data parallelism of each, and the pipeline that runs them. What is cut so far is filled: under
    FSDP2 block by block, as it is sharded.

    One device gets the plain module: DDP would only add its bookkeeping. Data parallelism of DTensors is
    FSDP2's, also where it only replicates: DistributedDataParallel takes plain parameters.
    """
    devices = make_device_mesh(mesh) if mesh[TP].size > 1 or layout.zero > 1 else None
    if mesh[TP].size > 1:
        assert devices is not None
        split_layers(model, devices[TP], sequence_parallel=layout.sequence_parallel)
    apply_remat(model.blocks, resolve_remat(layout))
    stages = cut_each(model, rank=mesh[PP].rank, layout=layout) if mesh[PP].size > 1 else {}
    models = list(stages.values()) or [model]
    if devices is not None:
        parallel = _distributed(
            models, devices, mesh=mesh, layout=layout, make_optimizer=make_optimizer, fill=fill
        )
    else:
        for one in models:
            fill(one)
        parallel = _replicated(models, mesh=mesh, layout=layout, make_optimizer=make_optimizer)
    if stages:
        parallel = run_stages(stages, parallel.under(Pipeline(mesh[PP])), mesh=mesh, layout=layout)
    return parallel


def _replicated(
    models: Sequence[nn.Module], *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker
) -> ParallelModel:
    """Whole parameters on every rank: DDP, and for ZeRO-1 an optimizer that updates some of them."""
    parameters = _named_parameters(models)
    if mesh.joined(*ROWS).size == 1:
        return ParallelModel(
            module=_as_one(models), optimizer=make_optimizer(parameters), parameters=parameters
        )
    wrap = partial(synchronize_gradients, bucket_size_mb=layout.bucket_mb, keeps_buckets=layout.pp > 1)
    replicas = [wrap(model, group=mesh.joined(*ROWS).group) for model in models]
    if layout.zero:
        make_optimizer = partial(make_optimizer, wrap=partial(ShardedOptimizer, group=mesh[DP_SHARD].group))
    parallel = ParallelModel(
        module=_as_one(replicas),
        optimizer=make_optimizer(parameters),
        parameters=parameters,
        skip_sync=replicas[0].no_sync,  # a pipeline's own schedule sees to it
    )
    return PartitionedStateModel(**vars(parallel), state_axis=mesh[DP_SHARD]) if layout.zero else parallel


def _distributed(
    models: Sequence[GPT | GPTStages],
    devices: DeviceMesh,
    *,
    mesh: Mesh,
    layout: Layout,
    make_optimizer: OptimizerMaker,
    fill: Fill,
) -> ParallelModel:
    """Parameters as DTensors: FSDP2 over tensor parallelism's parts of them."""
    if mesh.joined(*ROWS).size > 1:
        data = ROWS if mesh[DP_REPLICATE].size > 1 else DP_SHARD
        reshards = layout.zero == 3 and layout.reshard_after_forward
        for model in models:
            shard_parameters(model, devices[data], reshard_after_forward=reshards, fill=partial(fill, model))
    for model in models:
        fill(model)
    parameters, module = _named_parameters(models), _as_one(models)
    return ParallelModel(
        module=module,
        optimizer=make_optimizer(parameters, wrap=dtensor_optimizer),
        parameters=parameters,
        strategies=(Placed(partial(complete_gradients, module), ranks=mesh[TP].size),),
        skip_sync=partial(no_sync, models[0]) if mesh.joined(*ROWS).size > 1 else None,
        end_evaluation=partial(reshard_parameters, models),
        sharded_over=spread_over(parameters, mesh),
        elements=elements_by_name(parameters, mesh),
    )


def _named_parameters(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: parameter for model in models for name, parameter in model.named_parameters()}


def _as_one(modules: Sequence[nn.Module]) -> nn.Module:
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


@dataclass(frozen=True, kw_only=True)
class PartitionedStateModel(ParallelModel):
    """Whole parameters with partitioned optimizer state: each has it on one rank of an axis."""

    state_axis: Axis

    def keeps_moments(self, name: str) -> bool:
        """Whether this rank's part of the optimizer updates the parameter."""
        optimizer = self.optimizer
        assert isinstance(optimizer, ShardedOptimizer)
        return any(
            self.parameters[name] is p for group in optimizer.optim.param_groups for p in group["params"]
        )

    def moments_spread_over(self, name: str) -> tuple[Axis, ...]:
        """One rank of the axis has them."""
        return (self.state_axis,)

    def moments(self, key: str) -> TensorsByName:
        """Whole moments, any shapes, on every rank."""
        state = self.optimizer.state
        moments = {
            name: state[p][key].clone() if p in state else torch.zeros_like(p)
            for name, p in self.parameters.items()
        }
        for moment in moments.values():
            self.state_axis.all_reduce(moment.detach(), purpose=RECORD)
        return moments
