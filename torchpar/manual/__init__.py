"""torch-manual: we decide where data moves, with the collectives of `torch.distributed`."""

from compare.contract.experiment import Layout
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.tensor_parallel import tensor_parallel
from torchpar.mesh import Mesh
from torchpar.model import GPT
from torchpar.plan import OptimizerMaker, Plan
from torchpar.remat import apply_remat, resolve_remat


def parallelize(model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker) -> Plan:
    """The model under the layout. The order: tensor parallelism, recomputation, then what is done to a share.

    One device gets the plain module: the reference that every other run is held against.
    """
    split = None
    if mesh.tp.size > 1:
        split = tensor_parallel(model, mesh.tp, sequence_parallel=layout.sequence_parallel)
    apply_remat(model.blocks, resolve_remat(layout))
    plan = _share_data(model, mesh=mesh, layout=layout, make_optimizer=make_optimizer)
    return split.around(plan) if split else plan


def _share_data(model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker) -> Plan:
    """Data parallelism, around what tensor parallelism has left of the model."""
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters)
    if mesh.dp_replicate.size == 1:
        return Plan(module=model, optimizer=optimizer, parameters=parameters)
    replicas = DataParallel(
        model,
        gradient_sync=layout.gradient_sync,
        bucket_size_mb=layout.bucket_mb,
        group=mesh.dp_replicate,
    )
    return Plan(
        module=replicas,
        optimizer=optimizer,
        parameters=parameters,
        no_sync=replicas.no_sync,
        finish_gradient_synchronization=replicas.finish_gradient_synchronization,
    )
