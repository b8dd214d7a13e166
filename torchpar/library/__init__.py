"""torch-library: PyTorch's own wrappers decide, as a user would pick them."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from compare.contract.experiment import Layout
from torchpar.collectives import Axis
from torchpar.library.data_parallel import DataParallel
from torchpar.library.fully_sharded import FSDP, ShardedOptimizer
from torchpar.library.meshes import axes_of, dtensor_optimizer, full_tensors, make_device_mesh
from torchpar.library.tensor_parallel import complete_gradients, restore_order
from torchpar.library.tensor_parallel import tensor_parallel as split_layers
from torchpar.mesh import Mesh
from torchpar.model import GPT
from torchpar.plan import Named, OptimizerMaker, Plan
from torchpar.remat import apply_remat, resolve_remat


def parallelize(model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker) -> Plan:
    """The model under the layout. The order: tensor parallelism, recomputation, then data parallelism.

    One device gets the plain module: DDP would only add its bookkeeping. Data parallelism of DTensors is
    FSDP2's, also where it only replicates: DistributedDataParallel takes plain parameters.
    """
    devices = make_device_mesh(mesh) if mesh.tp.size > 1 or layout.zero > 1 else None
    if mesh.tp.size > 1:
        assert devices is not None
        split_layers(model, devices["tp"], sequence_parallel=layout.sequence_parallel)
    apply_remat(model.blocks, resolve_remat(layout))
    if devices is not None:
        return _distributed(model, devices, mesh=mesh, layout=layout, make_optimizer=make_optimizer)
    return _replicated(model, mesh=mesh, layout=layout, make_optimizer=make_optimizer)


def _replicated(model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker) -> Plan:
    """Whole parameters on every rank: DDP, and for ZeRO-1 an optimizer that updates some of them."""
    parameters = dict(model.named_parameters())
    if mesh.data.size == 1:
        return Plan(module=model, optimizer=make_optimizer(parameters), parameters=parameters)
    replicas = DataParallel(model, bucket_size_mb=layout.bucket_mb, group=mesh.data.group)
    wraps = {"wrap": partial(ShardedOptimizer, group=mesh.dp_shard.group)} if layout.zero else {}
    plan = Plan(
        module=replicas,
        optimizer=make_optimizer(parameters, **wraps),
        parameters=parameters,
        no_sync=replicas.no_sync,
        finish_gradient_synchronization=replicas.finish_gradient_synchronization,
    )
    return DealtStatePlan(**vars(plan), state_axis=mesh.dp_shard) if layout.zero else plan


def _distributed(
    model: GPT, devices: DeviceMesh, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker
) -> Plan:
    """Parameters as DTensors: FSDP2 over what tensor parallelism has left of them."""
    no_sync = nullcontext
    if mesh.data.size > 1:
        data = ("dp_replicate", "dp_shard") if mesh.dp_replicate.size > 1 else "dp_shard"
        no_sync = FSDP(
            model, devices[data], reshard_after_forward=layout.zero == 3 and layout.reshard_after_forward
        ).no_sync
    parameters = dict(model.named_parameters())
    axes = {name: axes_of(parameter, mesh) for name, parameter in parameters.items()}
    return Plan(
        module=model,
        optimizer=make_optimizer(parameters, wrap=dtensor_optimizer),
        parameters=parameters,
        no_sync=no_sync,
        finish_gradient_synchronization=partial(complete_gradients, model),
        sharded_over=axes.__getitem__,
        gathers=(full_tensors, partial(restore_order, ranks=mesh.tp.size)),
    )


@dataclass(frozen=True, kw_only=True)
class DealtStatePlan(Plan):
    """Whole parameters whose optimizer state is dealt out: each of them has it on one rank of an axis."""

    state_axis: Axis

    def moments(self, key: str) -> Named:
        """Whole ones, on every rank."""
        state = self.optimizer.state
        moments = {
            name: state[p][key].clone() if p in state else torch.zeros_like(p)
            for name, p in self.parameters.items()
        }
        for moment in moments.values():
            self.state_axis.all_reduce(moment.detach(), purpose="record")
        return moments
