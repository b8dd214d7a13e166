"""The engine jax-manual: the whole step runs per device inside one shard_map, and we write every collective.

`parallelize` composes the strategies, in the order in which a step meets them.
"""

from typing import Any

import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.contract.experiment import Layout
from jaxpar import collectives
from jaxpar.manual import data_parallel
from jaxpar.optimizer import global_norm
from jaxpar.plan import Loss, Plan, accumulated_gradients


def parallelize(
    loss: Loss, optimizer: optax.GradientTransformationExtraArgs, *, mesh: Mesh, layout: Layout
) -> Plan:
    """The training step of any loss over a pytree, with the layout's collectives written out.

    Args:
        loss: see `Loss`; each device calls it on its share of the batch.
        optimizer: takes `grad_norm` and `scalars` (`jaxpar.optimizer`).
        mesh: has an axis dp_replicate.
        layout: gradient_sync (naive, flat, bucketed) and bucket_mb.
    """
    # One replica: a psum over one device is nothing, and XLA removes it.
    method = layout.gradient_sync if layout.dp_replicate > 1 else "naive"

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        local = collectives.to_varying(params, data_parallel.AXIS)
        value, gradients = accumulated_gradients(loss, local, batch)
        gradients = data_parallel.synchronize_gradients(gradients, method=method, bucket_mb=layout.bucket_mb)
        grad_norm = global_norm(gradients)
        updates, opt_state = optimizer.update(
            gradients, opt_state, params, grad_norm=grad_norm, scalars=scalars
        )
        metrics = {"loss": collectives.all_reduce_mean(value, data_parallel.AXIS), "grad_norm": grad_norm}
        return optax.apply_updates(params, updates), opt_state, metrics, gradients

    batch_spec = P(None, data_parallel.AXIS)
    return Plan(
        step=collectives.per_device(
            step, mesh=mesh, in_specs=(P(), P(), batch_spec, P()), out_specs=(P(), P(), P(), P())
        ),
        state=NamedSharding(mesh, P()),
        batch=NamedSharding(mesh, batch_spec),
        scalars=NamedSharding(mesh, P()),
        compiler_options=collectives.KEEP_COLLECTIVES_APART,
    )
