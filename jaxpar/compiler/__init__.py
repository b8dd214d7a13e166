"""The engine jax-compiler: arrays are placed, and XLA decides what moves.

`parallelize` composes the strategies: the step is written as for one device, and each strategy says where
its arrays live.
"""

from functools import partial
from typing import Any

import optax
from jax import lax
from jax.sharding import Mesh

from compare.spec.axes import EP, ROWS
from compare.spec.experiment import Experiment
from jaxpar.comm.collectives import sum_over_replicas
from jaxpar.compiler import (
    context_parallel,
    data_parallel,
    expert_parallel,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
)
from jaxpar.hooks import Hooks, identity
from jaxpar.model import Loss, loss_function, pipeline_parts
from jaxpar.optimizer import global_norm
from jaxpar.placement import place_parameters, shardings, unpad
from jaxpar.remat import gathers_in_layers, remat_of
from jaxpar.stages import one_pass
from jaxpar.step import (
    ShardedStep,
    accumulated_gradients,
    metrics_of,
    passes_of,
    place_step,
    scaled,
    unscaled,
    updated,
)
from jaxpar.weights import STACKED


def parallelize(
    experiment: Experiment, optimizer: optax.GradientTransformationExtraArgs, *, mesh: Mesh
) -> ShardedStep:
    """The training step of a problem, as the compiler partitions it. The mesh has the axes of the layout."""
    layout, placements = experiment.layout, place_parameters(experiment)
    loss = _loss(experiment, placements, mesh=mesh)
    shard = partial(fully_sharded.shard_parameters, placements=placements, mesh=mesh)
    accumulated = shardings(mesh, placements, sharded=layout.zero >= 2)

    def gradients_of(params: Any, batch: Any, scalars: Any) -> Any:
        parts = 1 if layout.pp > 1 else passes_of(batch)  # a pipeline's loss is the mean over microbatches
        of = scaled(loss, scalars, parts=parts)

        def accumulate(params: Any, batch: Any) -> Any:
            if layout.pp > 1:
                batch = one_pass(batch, microbatches=layout.microbatches)
            return accumulated_gradients(of, params, batch, reduce=shard if layout.zero >= 2 else identity)

        # Gradients that accumulate whole (zero 0 and 1) can wait for the end, each device's own until then.
        # Not along ep: a dim of replicas would keep their tokens apart.
        late = tuple(axis for axis in ROWS if axis != EP) if layout.zero < 2 else (data_parallel.AXIS,)
        value, gradients = data_parallel.synchronize_gradients(
            accumulate, params, batch, mesh=mesh, axes=late, loops=layout.pp > 1
        )
        gradients = shard(lax.with_sharding_constraint(gradients, accumulated))
        return value, unscaled(gradients, scalars, parts=parts)

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        value, gradients = gradients_of(params, batch, scalars)
        grad_norm = global_norm(gradients)
        params, opt_state = updated(
            optimizer, shard(params), opt_state, gradients, grad_norm=grad_norm, scalars=scalars
        )
        return shard(params), opt_state, metrics_of(value, grad_norm), gradients

    return place_step(step, experiment, placements, mesh=mesh)


def _loss(experiment: Experiment, placements: Any, *, mesh: Mesh) -> Loss:
    """The problem's loss over stored parameters: what tp and cp split, dp_shard gathers, pp spreads."""
    layout, hooks = experiment.layout, Hooks(remat=remat_of(experiment.layout), sum_counts=sum_over_replicas)
    if layout.tp > 1:
        tensor_parallel.split_layers(hooks, experiment, mesh=mesh)
    if layout.ep > 1:
        expert_parallel.shard_experts(hooks, experiment, mesh=mesh)
    if layout.cp > 1:
        context_parallel.split_sequence(hooks, experiment, mesh=mesh)
    if gathers_in_layers(layout):
        fully_sharded.gather_layers(hooks, placements[STACKED], layout, mesh=mesh)
    if layout.pp > 1:
        loss = pipeline_parallel.pipelined(
            pipeline_parts(experiment, hooks), hooks, mesh=mesh, chunks=layout.chunks
        )
    else:
        loss = loss_function(experiment, hooks)
    if layout.zero == 3:
        return fully_sharded.gather_first(
            loss, placements, mesh=mesh, layers_too=not gathers_in_layers(experiment.layout)
        )
    return lambda params, batch: loss(unpad(params, placements), batch)
