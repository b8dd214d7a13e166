"""The engine jax-explicit: the type of an array includes its sharding, and JAX checks types when it traces.

`make_engine` composes the strategies. The step is written as for one device; where types differ, it has a
cast. XLA sends data for casts, for sums over split dims, and for look-ups. A missing cast is an error.
"""

from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from compare.spec.experiment import Experiment
from jaxpar.attention import attention_core
from jaxpar.engine import Engine
from jaxpar.explicit import (
    context_parallel,
    data_parallel,
    expert_parallel,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
)
from jaxpar.explicit.sharding_types import per_device
from jaxpar.hooks import Hooks
from jaxpar.model import Loss, LossOf, loss_function, pipeline_parts
from jaxpar.optimizer import Optimizer, global_norm
from jaxpar.placement import place_parameters, unpad
from jaxpar.remat import gathers_in_layers, remat_of
from jaxpar.tick_loop import to_microbatches
from jaxpar.weights import STACKED, without_layers


def make_engine(
    experiment: Experiment, mesh: Mesh, optimizer: Optimizer, loss_of: LossOf = loss_function
) -> Engine:
    """jax-explicit, for an experiment and a mesh with the axes of the layout, which it makes explicit.

    When a program is traced, JAX raises a ShardingTypeError for an operation whose types do not determine
    what is sent.
    """
    layout, placements = experiment.layout, place_parameters(experiment)
    mesh = mesh.update(axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    loss = _loss(experiment, placements, loss_of)
    scatter = partial(fully_sharded.scatter_gradients, placements=placements)

    def gradients(params: Any, batch: Any, scale: jax.Array | None) -> tuple[Any, Any]:
        if layout.pp > 1:
            batch = to_microbatches(batch, microbatches=layout.microbatches)
        return data_parallel.mean_gradients(
            loss, params, batch, placements, zero=layout.zero, scatter=scatter, scale=scale
        )

    return Engine(
        gradients=gradients,
        norm=global_norm,
        to_shards=partial(fully_sharded.shard_parameters, placements=placements),
        from_shards=partial(fully_sharded.gather_updated, placements=placements, zero=layout.zero),
        optimizer=optimizer,
        experiment=experiment,
        mesh=mesh,
        placements=placements,
        # The loss is the mean over devices, and in a pipeline over all microbatches.
        averaged_losses=1 if layout.pp > 1 else experiment.train.gradient_accumulation_steps,
    )


def _loss(experiment: Experiment, placements: Any, loss_of: LossOf) -> Loss:
    """The loss of stored parameters: tp and cp split the model, dp_shard gathers it, pp stages it."""
    layout, in_layers = experiment.layout, gathers_in_layers(experiment.layout)
    hooks = Hooks(
        remat=remat_of(experiment.layout), core=attention_core(experiment, per_device, by_types=True)
    )
    data_parallel.type_rows(hooks)
    if layout.tp > 1:
        tensor_parallel.split_layers(hooks, experiment)
    if layout.cp > 1:
        context_parallel.split_sequence(hooks, experiment)
    if layout.ep > 1:
        hooks.experts = expert_parallel.exchange_tokens
    if in_layers:
        fully_sharded.gather_layers(hooks, placements[STACKED], layout)
    if layout.pp > 1:
        loss = pipeline_parallel.pipelined(
            pipeline_parts(experiment, hooks), hooks, stages=layout.pp, chunks=layout.chunks
        )
    else:
        loss = loss_of(experiment, hooks)
    before_layers = without_layers(placements) if in_layers else placements
    if layout.zero == 3:
        return fully_sharded.gather_first(loss, before_layers)
    return lambda params, batch: loss(unpad(params, before_layers), batch)
