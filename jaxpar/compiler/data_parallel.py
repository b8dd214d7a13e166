"""Data parallelism by the compiler: say where things live, and XLA inserts the communication.

Every device holds all parameters and a share of the batch. The loss is a mean over the whole batch: that
it needs a sum over devices, and its gradients too, is for the partitioner to find out.
"""

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "dp_replicate"


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of a batch (A, B, ...): B is split."""
    return NamedSharding(mesh, P(None, AXIS))


def parameter_sharding(mesh: Mesh) -> NamedSharding:
    """Of parameters, gradients and moments: a replica on every device."""
    return NamedSharding(mesh, P())
