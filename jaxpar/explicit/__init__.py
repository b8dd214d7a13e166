"""The engine jax-explicit: the type of an array includes its sharding, and JAX checks types when it traces.

`make_engine` composes the strategies. The step is written as for one device; where types differ, it has a
cast. XLA sends data for casts alone. A missing cast is an error.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, reshard
from jax.sharding import PartitionSpec as P

from compare.spec.experiment import Experiment
from jaxpar.comm.collectives import sum_over_replicas
from jaxpar.engine import Engine
from jaxpar.explicit import (
    context_parallel,
    data_parallel,
    expert_parallel,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
)
from jaxpar.explicit.replicas import over_replicas
from jaxpar.hooks import Hooks, identity
from jaxpar.mlp import Routing
from jaxpar.model import Loss, loss_function, pipeline_parts
from jaxpar.optimizer import Optimizer, global_norm
from jaxpar.placement import place_parameters, specs, unpad
from jaxpar.remat import gathers_in_layers, remat_of
from jaxpar.step import accumulate_gradients
from jaxpar.tick_loop import to_microbatches
from jaxpar.weights import STACKED, without_layers


def make_engine(experiment: Experiment, mesh: Mesh, optimizer: Optimizer) -> Engine:
    """jax-explicit, for an experiment and a mesh with the axes of the layout, which it makes explicit.

    When a program is traced, JAX raises a ShardingTypeError for an operation whose types do not determine
    what is sent.
    """
    layout, placements = experiment.layout, place_parameters(experiment)
    mesh = mesh.update(axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    loss = _loss(experiment, placements)
    at_rest = layout.zero == 3
    scatter = partial(fully_sharded.scatter_gradients, placements=placements)

    def synchronize(gradients: Any) -> Any:
        gradients = scatter(gradients) if layout.zero else gradients
        return data_parallel.synchronize_gradients(gradients, placements, sharded=layout.zero > 0)

    def gradients(params: Any, batch: Any, scale: jax.Array | None) -> tuple[Any, Any]:
        if layout.pp > 1:
            batch = to_microbatches(batch, microbatches=layout.microbatches)
        params = reshard(params, over_replicas(placements, "reduced", sharded=at_rest))
        types = over_replicas(placements, "unreduced", sharded=layout.zero >= 2)
        zeros = jax.tree.map(
            lambda w, spec: reshard(jnp.zeros(w.shape, w.dtype, out_sharding=P(*spec.partitions)), spec),
            params,
            types,
        )
        return accumulate_gradients(
            loss,
            params,
            batch,
            scale=scale,
            reduce=scatter if layout.zero >= 2 else identity,
            finish=synchronize,
            like=zeros,
        )

    # The loss of a pipeline is the mean of all microbatches; each replica's loss is divided before backward.
    summed = 1 if layout.pp > 1 else experiment.train.gradient_accumulation_steps
    return Engine(
        gradients=gradients,
        norm=global_norm,
        to_shards=partial(fully_sharded.shard_parameters, placements=placements),
        from_shards=lambda shards: reshard(shards, specs(placements, sharded=at_rest)),
        optimizer=optimizer,
        experiment=experiment,
        mesh=mesh,
        placements=placements,
        summed_microbatches=summed / (layout.data_parallel * layout.cp),
    )


def _loss(experiment: Experiment, placements: Any) -> Loss:
    """The loss of stored parameters: tp and cp split the model, dp_shard gathers it, pp stages it."""
    layout, in_layers = experiment.layout, gathers_in_layers(experiment.layout)
    hooks = Hooks(remat=remat_of(experiment.layout), sum_counts=sum_over_replicas)
    if layout.tp > 1:
        tensor_parallel.split_layers(hooks, experiment)
    if layout.cp > 1:
        context_parallel.split_sequence(hooks, experiment)
    if layout.ep > 1:
        hooks.experts = expert_parallel.exchange_tokens
    if in_layers:
        fully_sharded.gather_layers(hooks, placements[STACKED], layout)
    gathered = without_layers(placements) if in_layers else placements
    if layout.pp > 1:
        loss = pipeline_parallel.pipelined(
            pipeline_parts(experiment, hooks), hooks, stages=layout.pp, chunks=layout.chunks
        )
    else:
        loss = loss_function(experiment, hooks)
    loss = data_parallel.each_replica(loss, layout)

    def loss_of_stored(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        true = unpad({key: params[key] for key in gathered}, gathered)
        return loss({**params, **true}, batch)

    if layout.zero == 3:
        return fully_sharded.gather_first(loss_of_stored, gathered)
    return loss_of_stored
