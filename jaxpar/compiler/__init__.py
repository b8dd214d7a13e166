"""The engine jax-compiler: arrays have shardings, and XLA inserts the communication.

`make_engine` composes the strategies. The step is written as for one device; each strategy constrains where
arrays are.
"""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from compare.spec.axes import EP, ROWS
from compare.spec.experiment import Experiment
from jaxpar.attention import attention_core
from jaxpar.comm.collectives import sum_over_replicas
from jaxpar.compiler import (
    context_parallel,
    data_parallel,
    expert_parallel,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
)
from jaxpar.engine import Engine
from jaxpar.hooks import Hooks, identity
from jaxpar.model import Loss, LossOf, loss_function, pipeline_parts
from jaxpar.optimizer import Optimizer, global_norm
from jaxpar.placement import place_parameters, specs, unpad
from jaxpar.remat import gathers_in_layers, remat_of
from jaxpar.step import accumulate_gradients
from jaxpar.tick_loop import to_microbatches
from jaxpar.weights import STACKED


def make_engine(
    experiment: Experiment, mesh: Mesh, optimizer: Optimizer, loss_of: LossOf = loss_function
) -> Engine:
    """jax-compiler, for an experiment and a mesh with the axes of the layout."""
    layout, placements = experiment.layout, place_parameters(experiment)
    shard = partial(fully_sharded.shard_parameters, placements=placements)
    accumulated = specs(placements, sharded=layout.zero >= 2)
    reduce = shard if layout.zero >= 2 else identity

    # Full gradients (zero 0 and 1) stay local to a replica until all passes are done. Exclude ep: its
    # ranks exchange tokens, which separate replica rows would prevent.
    axes = tuple(axis for axis in ROWS if axis != EP) if layout.zero < 2 else (data_parallel.AXIS,)
    deferred = data_parallel.deferred_replicas(experiment, axes)
    loss = _loss(experiment, placements, loss_of, mapped=axes if deferred > 1 else ())

    def gradients(params: Any, batch: Any, scale: jax.Array | None) -> Any:
        def accumulate(params: Any, batch: Any) -> Any:
            if layout.pp > 1:
                batch = to_microbatches(batch, microbatches=layout.microbatches)
            return accumulate_gradients(loss, params, batch, scale=scale, reduce=reduce)

        value, gradients = data_parallel.synchronize_gradients(
            accumulate, params, batch, axes=axes, deferred=deferred
        )
        return value, shard(lax.with_sharding_constraint(gradients, accumulated))

    return Engine(
        gradients=gradients,
        norm=global_norm,
        to_shards=shard,
        from_shards=shard,  # the program's result is constrained to whole parameters
        optimizer=optimizer,
        experiment=experiment,
        mesh=mesh,
        placements=placements,
        # The loss of a pipeline is already the mean of all microbatches.
        averaged_losses=deferred * (1 if layout.pp > 1 else experiment.train.gradient_accumulation_steps),
    )


def _loss(experiment: Experiment, placements: Any, loss_of: LossOf, *, mapped: tuple[str, ...]) -> Loss:
    """The loss of stored parameters: tp and cp split the model, dp_shard gathers it, pp stages it.

    `mapped` are the axes of the `vmap` over replicas that calls it.
    """
    layout, hooks = experiment.layout, Hooks(remat=remat_of(experiment.layout), sum_counts=sum_over_replicas)
    hooks.core = attention_core(experiment, tensor_parallel.pin_heads)
    if layout.tp > 1:
        tensor_parallel.split_layers(hooks, experiment)
    if layout.ep > 1:
        expert_parallel.shard_experts(hooks, experiment)
    if layout.cp > 1:
        context_parallel.split_sequence(hooks, experiment, mapped=mapped)
    if gathers_in_layers(layout):
        fully_sharded.gather_layers(hooks, placements[STACKED], layout)
    if layout.pp > 1:
        loss = pipeline_parallel.pipelined(
            pipeline_parts(experiment, hooks), hooks, stages=layout.pp, chunks=layout.chunks
        )
    else:
        loss = loss_of(experiment, hooks)
    if layout.zero == 3:
        return fully_sharded.gather_first(
            loss, placements, layers_too=not gathers_in_layers(experiment.layout)
        )
    return lambda params, batch: loss(unpad(params, placements), batch)
