"""torch-library: PyTorch's own wrappers decide, as a user would pick them."""

from compare.contract.experiment import Layout
from torchpar.library.data_parallel import DataParallel
from torchpar.mesh import Mesh
from torchpar.model import GPT
from torchpar.plan import OptimizerMaker, Plan
from torchpar.remat import apply_remat, resolve_remat


def parallelize(model: GPT, *, mesh: Mesh, layout: Layout, make_optimizer: OptimizerMaker) -> Plan:
    """The model under the layout. The order: recomputation, then data parallelism around everything.

    One device gets the plain module: DDP would only add its bookkeeping.
    """
    apply_remat(model.blocks, resolve_remat(layout))
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters)
    if mesh.dp_replicate.size == 1:
        return Plan(module=model, optimizer=optimizer, parameters=parameters)
    replicas = DataParallel(model, bucket_size_mb=layout.bucket_mb, group=mesh.dp_replicate.group)
    return Plan(
        module=replicas,
        optimizer=optimizer,
        parameters=parameters,
        no_sync=replicas.no_sync,
        finish_gradient_synchronization=replicas.finish_gradient_synchronization,
    )
