"""The engine jax-manual: every device runs the step inside one shard_map, with explicit collectives.

`make_engine` composes the strategies. Parameters are marked, the gradients of this device are computed, with
or without a pipeline, and then they are reduced along every axis.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from compare.contract.communication import LOSS, NORM
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import Ticks, lock_step
from compare.spec.axes import DATA
from compare.spec.experiment import Experiment
from jaxpar.attention import attention_core
from jaxpar.comm import collectives
from jaxpar.engine import Engine, Gradients, Shardings
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
from jaxpar.model import Loss, LossOf, loss_function, pipeline_parts
from jaxpar.optimizer import Optimizer
from jaxpar.placement import place_parameters
from jaxpar.remat import gathers_in_layers, remat_of
from jaxpar.step import accumulate_gradients, scale_loss
from jaxpar.weights import without_layers

STRATEGIES = (
    pipeline_parallel.strategy,
    tensor_parallel.strategy,
    context_parallel.strategy,
    expert_parallel.strategy,
    fully_sharded.strategy,
    data_parallel.strategy,
)
"""Strategies of the axes, in the order in which they change the model and the gradients."""


def make_engine(
    experiment: Experiment, mesh: Mesh, optimizer: Optimizer, loss_of: LossOf = loss_function
) -> Engine:
    """jax-manual, for an experiment and a mesh with the axes of the layout."""
    layout, placements = experiment.layout, place_parameters(experiment)
    passes, ticks = experiment.train.gradient_accumulation_steps, None
    hooks = Hooks(remat=remat_of(layout), core=attention_core(experiment))
    axes = [strategy(experiment, placements, hooks) for strategy in STRATEGIES]
    if layout.pp > 1:
        microbatches = passes * layout.microbatches
        schedule = make_schedule(
            layout.schedule, ranks=layout.pp, microbatches=microbatches, chunks=layout.chunks
        )
        # With remat full, forward keeps only the inputs of its stages.
        ticks = lock_step(schedule, keeps=remat_of(layout) != "full")
        local_gradients = _gradients_by_pipeline(experiment, placements, hooks, ticks)
    else:
        local_gradients = _gradients_by_accumulation(experiment, placements, loss_of(experiment, hooks))

    def gradients(params: Any, batch: Any, scale: jax.Array | None) -> Any:
        for axis in axes:
            params = axis.mark(params)
        (value, routing), gradients = local_gradients(params, batch, scale)
        for axis in axes:
            gradients = axis.reduce(gradients)
        loss = collectives.all_reduce(value, DATA, purpose=LOSS) / collectives.axis_size(DATA)
        return (loss, routing), gradients

    shard, gather = fully_sharded.shard_parameters, fully_sharded.all_gather_parameters
    return Engine(
        gradients=gradients,
        norm=lambda gradients: global_norm(gradients, placements),
        to_shards=identity if layout.zero == 3 else partial(shard, placements=placements),
        from_shards=identity if layout.zero == 3 else partial(gather, placements=placements),
        optimizer=optimizer,
        experiment=experiment,
        mesh=mesh,
        placements=placements,
        averaged_losses=passes * layout.microbatches * layout.data_parallel * layout.cp,
        on_mesh=run_per_device,
        ticks=ticks,
        compiler_options=collectives.KEEP_COLLECTIVES_APART,
    )


def run_per_device(step: Callable[..., Any], shardings: Shardings) -> Callable[..., Any]:
    """A step on global arrays: inside one `shard_map`, each device runs `step` on its shards."""
    spec = jax.tree.map(lambda sharding: sharding.spec, shardings)

    @partial(jax.jit, inline=True)  # traced once for all programs that are compiled from it
    def global_step(params: Any, opt_state: Any, batch: Any, scalars: Any) -> Any:
        in_specs = spec.params, spec.opt_state, {name: spec.batch[name] for name in batch}, spec.scalar
        out_specs = spec.params, spec.opt_state, spec.metrics, spec.gradients
        local_step = collectives.per_device(step, in_specs=in_specs, out_specs=out_specs)
        return local_step(params, opt_state, batch, scalars)

    return global_step


def global_norm(gradients: Any, placements: Any) -> jax.Array:
    """Euclidean norm of the shards of all devices, with one all-reduce for each set of axes."""
    squares: dict[tuple[str, ...], list[jax.Array]] = {}
    for p, g in zip(jax.tree.leaves(placements), jax.tree.leaves(gradients), strict=True):
        squares.setdefault(p.axes, []).append(jnp.sum(jnp.square(g)))
    totals = []
    for axes, of_leaves in squares.items():
        total = jnp.stack(of_leaves).sum()
        totals.append(collectives.all_reduce(total, axes, purpose=NORM) if axes else total)
    return jnp.sqrt(jnp.stack(totals).sum())


def _gradients_by_accumulation(experiment: Experiment, placements: Any, loss: Loss) -> Gradients:
    """Gradients of one device without a pipeline: all blocks, one microbatch after the other."""
    zero = experiment.layout.zero
    scatter = partial(fully_sharded.scatter_gradients, placements=placements)
    if zero == 3:
        loss = fully_sharded.gather_first(loss, without_layers(placements))
        scatter = identity  # the transpose of the gather scatters

    def of_shards(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        return loss(params if zero == 3 else fully_sharded.unpad(params, placements), batch)

    def gradients_of(params: Any, batch: Any, scale: jax.Array | None):
        if zero < 2:
            value, gradients = accumulate_gradients(of_shards, params, batch, scale=scale)
            return value, scatter(gradients)
        like = params if zero == 3 else fully_sharded.shard_parameters(params, placements)
        return accumulate_gradients(of_shards, params, batch, scale=scale, reduce=scatter, like=like)

    return gradients_of


def _gradients_by_pipeline(experiment: Experiment, placements: Any, hooks: Hooks, ticks: Ticks) -> Gradients:
    """Gradients of one device of a pipeline: its stages, for all microbatches of a step."""
    layout, parts = experiment.layout, pipeline_parts(experiment, hooks)
    # Parameters that are full in the ticks. Under zero 2 and 3 each microbatch scatters their gradients.
    # Blocks that are gathered in the ticks are scattered by autodiff.
    full = without_layers(placements) if gathers_in_layers(experiment.layout) else placements
    unpad = partial(fully_sharded.unpad, placements=full)
    scatter = partial(fully_sharded.scatter_gradients, placements=full)

    def gradients_of(params: Any, batch: Any, scale: jax.Array | None):
        batch = jax.tree.map(  # (A, b, ...) -> (A microbatches, b / microbatches, ...)
            lambda x: x.reshape(x.shape[0] * layout.microbatches, -1, *x.shape[2:]), batch
        )
        like = fully_sharded.shard_parameters(params, placements) if layout.zero == 2 else params
        if layout.zero == 3:
            # All-gather once a step. In the ticks both ends would gather for every microbatch.
            params = fully_sharded.gather(params, full)
        loss = scale_loss(lambda *stream: (parts.loss(*stream), Routing()), scale)
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
