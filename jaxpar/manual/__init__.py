"""The engine jax-manual: the step runs per device inside one shard_map, and we write every collective.

`parallelize` composes the strategies. Read `_step` for the order in which a step meets them, `_accumulated`
and `_pipelined` for how one device comes by its gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from compare.contract.communication import LOSS, NORM
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import Ticks, lock_step
from compare.spec.axes import DATA
from compare.spec.experiment import Experiment
from jaxpar.comm import collectives
from jaxpar.hooks import Hooks, identity
from jaxpar.manual import (
    context_parallel,
    data_parallel,
    expert_parallel,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
)
from jaxpar.mlp import Routing
from jaxpar.model import loss_function, pipeline_parts
from jaxpar.optimizer import moments_like
from jaxpar.placement import place_parameters, specs
from jaxpar.remat import gathers_in_layers, remat_of
from jaxpar.step import (
    ShardedStep,
    accumulated_gradients,
    batch_specs,
    metrics_of,
    metrics_specs,
    passes_of,
    place_step,
    scaled,
    unscaled,
    updated,
)
from jaxpar.weights import parameter_shapes, without_layers

STRATEGIES = (
    pipeline_parallel.strategy,
    tensor_parallel.strategy,
    context_parallel.strategy,
    expert_parallel.strategy,
    fully_sharded.strategy,
    data_parallel.strategy,
)
"""What each axis adds to the step, in this order."""
Gradients = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(this device's parameters, its share of a batch, the step's scalars) -> mean loss with routing, and
gradients, each device's own."""


def parallelize(
    experiment: Experiment, optimizer: optax.GradientTransformationExtraArgs, *, mesh: Mesh
) -> ShardedStep:
    """The training step of a problem: each device runs the loss, or its parts, on its share of the batch."""
    layout, placements = experiment.layout, place_parameters(experiment)
    at_rest, sharded = specs(placements, sharded=layout.zero == 3), specs(placements, sharded=True)
    moments = moments_like(optimizer, parameter_shapes(experiment), sharded)
    ticks = None
    if layout.pp > 1:
        microbatches = experiment.train.gradient_accumulation_steps * layout.microbatches
        schedule = make_schedule(
            layout.schedule, ranks=layout.pp, microbatches=microbatches, chunks=layout.chunks
        )
        # With remat full, forward keeps only the inputs of its stages.
        ticks = lock_step(schedule, keeps=remat_of(layout) != "full")
    of_device, of_batch = _step(experiment, optimizer, placements, ticks), batch_specs(experiment, mesh)

    @partial(jax.jit, inline=True)  # traced once for all programs that are compiled from it
    def step(params: Any, opt_state: Any, batch: Any, scalars: Any) -> Any:
        in_specs = at_rest, moments, {name: of_batch[name] for name in batch}, P()
        out_specs = at_rest, moments, metrics_specs(experiment, mesh), sharded
        on_devices = collectives.per_device(of_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return on_devices(params, opt_state, batch, scalars)

    options = collectives.KEEP_COLLECTIVES_APART
    return place_step(step, experiment, placements, mesh=mesh, ticks=ticks, compiler_options=options)


def _step(
    experiment: Experiment,
    optimizer: optax.GradientTransformationExtraArgs,
    placements: Any,
    ticks: Ticks | None,
) -> Callable[..., Any]:
    """The step of each device: gradients of its share, their reduction, the update of its shards."""
    hooks = Hooks(remat=remat_of(experiment.layout))
    axes = [strategy(experiment, placements, hooks) for strategy in STRATEGIES]
    zero3 = experiment.layout.zero == 3
    gradients_of = (
        _pipelined(experiment, placements, hooks, ticks)
        if ticks
        else _accumulated(experiment, placements, hooks)
    )

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        local = params
        for axis in axes:
            local = axis.mark(local)
        value, gradients = gradients_of(local, batch, scalars)
        for axis in axes:
            gradients = axis.reduce(gradients)
        parts = passes_of(batch) * experiment.layout.microbatches  # each has a loss of its own
        gradients = unscaled(gradients, scalars, parts=parts)
        grad_norm = global_norm(gradients, placements)
        shards = params if zero3 else fully_sharded.shard_parameters(params, placements)
        shards, opt_state = updated(
            optimizer, shards, opt_state, gradients, grad_norm=grad_norm, scalars=scalars
        )
        params = shards if zero3 else fully_sharded.all_gather_parameters(shards, placements)
        value, routing = value
        loss = collectives.all_reduce(value, DATA, purpose=LOSS) / collectives.axis_size(DATA)
        return params, opt_state, metrics_of((loss, routing), grad_norm), gradients

    return step


def global_norm(gradients: Any, placements: Any) -> jax.Array:
    """Euclidean norm of all devices' shards, each element counted once; a psum for each set of axes."""
    squares: dict[tuple[str, ...], list[jax.Array]] = {}
    for p, g in zip(jax.tree.leaves(placements), jax.tree.leaves(gradients), strict=True):
        squares.setdefault(p.axes, []).append(jnp.sum(jnp.square(g)))
    totals = []
    for axes, of_leaves in squares.items():
        total = jnp.stack(of_leaves).sum()
        totals.append(collectives.all_reduce(total, axes, purpose=NORM) if axes else total)
    return jnp.sqrt(jnp.stack(totals).sum())


def _accumulated(experiment: Experiment, placements: Any, hooks: Hooks) -> Gradients:
    """Without a pipeline: the full model on each device, one microbatch after the other."""
    zero, loss = experiment.layout.zero, loss_function(experiment, hooks)
    scatter = partial(fully_sharded.scatter_gradients, placements=placements)
    if zero == 3:
        loss = fully_sharded.gather_first(loss, without_layers(placements))
        scatter = identity  # the gather's transpose has done it

    def of_shards(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        return loss(params if zero == 3 else fully_sharded.unpad(params, placements), batch)

    def gradients_of(params: Any, batch: Any, scalars: Any):
        of = scaled(of_shards, scalars, parts=passes_of(batch))
        if zero < 2:
            value, gradients = accumulated_gradients(of, params, batch)
            return value, scatter(gradients)
        like = params if zero == 3 else fully_sharded.shard_parameters(params, placements)
        return accumulated_gradients(of, params, batch, reduce=scatter, like=like)

    return gradients_of


def _pipelined(experiment: Experiment, placements: Any, hooks: Hooks, ticks: Ticks) -> Gradients:
    """With a pipeline: this device's stages, for all microbatches of a step."""
    layout, parts = experiment.layout, pipeline_parts(experiment, hooks)
    # What the ticks see at its full size: their gradients dp_shard scatters, under zero 2 and 3 once a
    # microbatch. Autodiff scatters those of blocks that are gathered in the ticks.
    full = without_layers(placements) if gathers_in_layers(experiment.layout) else placements
    unpad = partial(fully_sharded.unpad, placements=full)
    scatter = partial(fully_sharded.scatter_gradients, placements=full)

    def gradients_of(params: Any, batch: Any, scalars: Any):
        batch = jax.tree.map(  # (A, b, ...) -> (A microbatches, b / microbatches, ...)
            lambda x: x.reshape(x.shape[0] * layout.microbatches, -1, *x.shape[2:]), batch
        )
        like = fully_sharded.shard_parameters(params, placements) if layout.zero == 2 else params
        if layout.zero == 3:
            # Once a step, not in the ticks: there both ends would gather it for every microbatch.
            params = fully_sharded.gather(params, full)
        loss = scaled(lambda *stream: (parts.loss(*stream), Routing()), scalars, parts=passes_of(batch))
        value, gradients = pipeline_parallel.run_pipeline(
            parts._replace(
                embed=lambda params, batch: parts.embed(unpad(params), batch),
                layers=lambda params, *stream: parts.layers(unpad(params), *stream),
                loss=lambda params, *stream: loss(unpad(params), *stream)[0],
            ),
            ticks,
            params,
            batch,
            reduce=scatter if layout.zero >= 2 else identity,
            like=like,
        )
        return (value, Routing()), gradients if layout.zero >= 2 else scatter(gradients)

    return gradients_of
