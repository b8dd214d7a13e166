"""The engine jax-compiler: arrays are placed, and XLA decides what moves.

`parallelize` composes the strategies: the step is written as for one device, and each strategy has its say
about where its arguments live.
"""

from functools import partial
from typing import Any

import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.contract.experiment import Layout
from jaxpar.compiler import data_parallel
from jaxpar.optimizer import global_norm
from jaxpar.plan import Loss, Plan, accumulated_gradients


def parallelize(
    loss: Loss, optimizer: optax.GradientTransformationExtraArgs, *, mesh: Mesh, layout: Layout
) -> Plan:
    """The training step of any loss over a pytree, as the compiler partitions it.

    Args:
        loss: see `Loss`.
        optimizer: takes `grad_norm` and `scalars` (`jaxpar.optimizer`).
        mesh: has an axis dp_replicate.
        layout: leaves the compiler no choice yet.
    """
    gradients_of = partial(accumulated_gradients, loss)

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        value, gradients = data_parallel.reduce_after_accumulation(gradients_of, params, batch, mesh=mesh)
        grad_norm = global_norm(gradients)
        updates, opt_state = optimizer.update(
            gradients, opt_state, params, grad_norm=grad_norm, scalars=scalars
        )
        metrics = {"loss": value, "grad_norm": grad_norm}
        return optax.apply_updates(params, updates), opt_state, metrics, gradients

    return Plan(
        step=step,
        state=data_parallel.parameter_sharding(mesh),
        batch=data_parallel.batch_sharding(mesh),
        scalars=NamedSharding(mesh, P()),
    )
