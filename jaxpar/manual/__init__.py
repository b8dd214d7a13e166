"""The engine jax-manual: the whole step runs per device inside one shard_map, and we write every collective.

`parallelize` composes the strategies. Read `_step` for the order in which a step meets them, `_edits` for
what is swapped in the model, `_accumulated` and `_pipelined` for how one device comes by its gradients, and
`_synchronize` for how they are reduced.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.contract.communication import LOSS
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import Ticks, lock_step
from compare.spec.axes import BATCH
from compare.spec.experiment import Layout
from jaxpar.comm import collectives
from jaxpar.comm.mesh import require_layout
from jaxpar.loss_scale import scaled, unless_overflowed, unscaled
from jaxpar.manual import data_parallel, fully_sharded, pipeline_parallel, tensor_parallel
from jaxpar.manual.norm import global_norm
from jaxpar.optimizer import state_like
from jaxpar.placement import map_alike, specs
from jaxpar.problem import Edit, Loss, Pieces, Problem
from jaxpar.remat import Remat
from jaxpar.tracing.edits import require_edits
from jaxpar.training_step import ShardedStep, accumulated_gradients, passes_of, shardings

Gradients = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(this device's parameters, its share of a batch, the step's scalars) -> mean loss and gradients, each
device's own."""


def parallelize(
    problem: Problem, optimizer: optax.GradientTransformationExtraArgs, *, mesh: Mesh, layout: Layout
) -> ShardedStep:
    """The training step of a problem, with the layout's collectives written out.

    Args:
        problem: its loss, or its pieces, run on each device, on its share of the batch.
        optimizer: of the form of `jaxpar.optimizer.make_optimizer`'s: it takes `grad_norm` and `scalars`.
        mesh: has the axes of `layout.axes`.
        layout: all of it.

    Raises:
        ExperimentError: the engine has no such schedule, or another part of the layout.
        TypeError: the optimizer's state is of another form than `make_optimizer`'s.
        ValueError: a mesh of another shape; a pipeline, and a problem without pieces. And from the step,
            when it is traced: the loss uses parameters past the edits (`jaxpar.tracing.edits`).
    """
    require_layout(layout, mesh, folder="manual")
    placements = problem.place(layout, split=tensor_parallel.SPLIT)
    batch_spec = P(None, tuple(axis for axis in BATCH if mesh.shape[axis] > 1))
    at_rest = specs(placements, sharded=layout.zero == 3)
    sharded = specs(placements, sharded=True)
    moments = state_like(optimizer, problem.shapes, sharded)
    step = collectives.per_device(
        _step(problem, optimizer, placements, layout),
        mesh=mesh,
        in_specs=(at_rest, moments, batch_spec, P()),
        out_specs=(at_rest, moments, P(), sharded),
    )
    return ShardedStep(
        step=jax.jit(step, inline=True),  # traced once for all programs that are compiled from it
        placements=placements,
        params=shardings(mesh, placements, sharded=layout.zero == 3),
        moments=shardings(mesh, placements, sharded=True),
        accumulated=shardings(mesh, placements, sharded=layout.zero >= 2),
        batch=NamedSharding(mesh, batch_spec),
        scalars=NamedSharding(mesh, P()),
        compiler_options=collectives.KEEP_COLLECTIVES_APART,
    )


def _step(
    problem: Problem,
    optimizer: optax.GradientTransformationExtraArgs,
    placements: Any,
    layout: Layout,
) -> Callable[..., Any]:
    """The step of each device: gradients of its share, their reduction, the update of its shards."""
    gradients_of = (_pipelined if layout.pp > 1 else _accumulated)(problem, placements, layout)
    gathers_layers = _gathers_layers(problem, layout)

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        require_edits(problem, placements, batch, layout=layout, gathers_layers=gathers_layers)
        value, gradients = gradients_of(_mark_varying(params, placements, layout), batch, scalars)
        parts = passes_of(batch) * layout.microbatches  # each has a loss of its own
        gradients = unscaled(_synchronize(gradients, placements, layout), scalars, parts=parts)
        grad_norm = global_norm(gradients, placements)
        shards = params if layout.zero == 3 else fully_sharded.shard_parameters(params, placements)
        updates, moved = optimizer.update(gradients, opt_state, shards, grad_norm=grad_norm, scalars=scalars)
        after = (optax.apply_updates(shards, updates), moved)
        shards, opt_state = unless_overflowed(
            after, (shards, opt_state), grad_norm=grad_norm, scalars=scalars
        )
        params = shards if layout.zero == 3 else fully_sharded.all_gather_parameters(shards, placements)
        loss = collectives.all_reduce_mean(value, BATCH, purpose=LOSS)
        metrics = {"loss": loss, "grad_norm": grad_norm}
        return params, opt_state, metrics, gradients

    return step


def _mark_varying(params: Any, placements: Any, layout: Layout) -> Any:
    """Parameters whose gradients are each device's own, along all axes over which we reduce them."""
    params = collectives.to_varying(params, data_parallel.AXIS)
    params = fully_sharded.mark_varying(params, placements, stage=layout.zero)
    if layout.sequence_parallel:
        params = tensor_parallel.mark_varying(params, placements)
    if layout.pp > 1:
        params = pipeline_parallel.mark_varying(params, placements)
    return params


def _accumulated(problem: Problem, placements: Any, layout: Layout) -> Gradients:
    """Without a pipeline: the whole model on each device, one microbatch after the other."""
    loss = _loss(problem, placements, layout)
    scatter = partial(fully_sharded.scatter_gradients, placements=placements)

    def gradients_of(params: Any, batch: Any, scalars: Any):
        of = scaled(loss, scalars, parts=passes_of(batch))
        if layout.zero == 2:
            like = fully_sharded.shard_parameters(params, placements)
            return accumulated_gradients(of, params, batch, reduce=scatter, like=like)
        value, gradients = accumulated_gradients(of, params, batch)
        return value, gradients if layout.zero == 3 else scatter(gradients)

    return gradients_of


def _loss(problem: Problem, placements: Any, layout: Layout) -> Loss:
    """The problem's loss over one device's stored parameters."""
    loss = problem.edited(_edits(problem, placements, layout))
    if layout.zero == 3:
        return fully_sharded.gather_non_layer_parameters(loss, placements, stacked=problem.stacked)
    return lambda params, batch: loss(fully_sharded.unpad(params, placements), batch)


def _pipelined(problem: Problem, placements: Any, layout: Layout) -> Gradients:
    """With a pipeline: this device's stages, for all microbatches of a step."""
    pieces = _pieces(problem, placements, layout)
    up_front = {key: p for key, p in placements.items() if _gathered_up_front(key, problem, layout)}
    # Gradients that dp_shard scatters once a microbatch; autodiff scatters those of layers gathered in ticks.
    in_ticks = {2: placements, 3: up_front}.get(layout.zero, {})

    def scatter(gradients: Any) -> Any:
        found = {key: in_ticks[key] for key in gradients if key in in_ticks}
        return gradients | fully_sharded.scatter_gradients({key: gradients[key] for key in found}, found)

    def gradients_of(params: Any, batch: Any, scalars: Any):
        batch = pipeline_parallel.microbatches(batch, each=layout.microbatches)
        like = fully_sharded.shard_parameters(params, placements) if layout.zero == 2 else params
        if layout.zero == 3:
            # Once a step, not in the ticks: there both ends would gather it for every microbatch.
            params = params | fully_sharded.gather_stored({key: params[key] for key in up_front}, up_front)
        value, gradients = pipeline_parallel.run_pipeline(
            replace(pieces, loss=scaled(pieces.loss, scalars, parts=passes_of(batch))),
            _ticks(layout, batch, remat=problem.remat),
            params,
            batch,
            stacked=problem.stacked,
            reduce=scatter,
            like=like,
        )
        return value, gradients if in_ticks else fully_sharded.scatter_gradients(gradients, placements)

    return gradients_of


def _gathers_layers(problem: Problem, layout: Layout) -> bool:
    """True if layers are stored as shards that each gathers for itself."""
    return (
        layout.zero == 3
        and problem.stacked in problem.shapes
        and not _gathered_up_front(problem.stacked, problem, layout)
    )


def _gathered_up_front(key: str, problem: Problem, layout: Layout) -> bool:
    """Under zero 3: once a step, and kept. In a pipeline without reshard_after_forward the layers, too.

    A microbatch's backward follows its forward after some ticks, and others' forwards are in between.
    """
    return key != problem.stacked or (layout.pp > 1 and not layout.reshard_after_forward)


def _ticks(layout: Layout, batch: Any, *, remat: Remat) -> Ticks:
    """The layout's schedule, for as many microbatches as there are."""
    (microbatches,) = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    return lock_step(
        make_schedule(layout.schedule, ranks=layout.pp, microbatches=microbatches, chunks=layout.chunks),
        keeps=pipeline_parallel.keeps_activations(remat),
    )


def _pieces(problem: Problem, placements: Any, layout: Layout) -> Pieces:
    """The problem's pieces over one device's parameters of stored size; under zero 3, its layers' shards."""
    pieces = problem.edited_pieces(_edits(problem, placements, layout))
    padded = {
        key: p for key, p in placements.items() if layout.zero < 3 or _gathered_up_front(key, problem, layout)
    }

    def unpad(params: Any) -> Any:
        return params | fully_sharded.unpad({key: params[key] for key in padded}, padded)

    return Pieces(
        embed=lambda params, batch: pieces.embed(unpad(params), batch),
        layers=lambda params, x, batch, first: pieces.layers(unpad(params), x, batch, first),
        loss=lambda params, x, batch: pieces.loss(unpad(params), x, batch),
    )


def _edits(problem: Problem, placements: Any, layout: Layout) -> list[Edit]:
    """Edits of the model in order: pp's recomputation, tp's split layers, then dp_shard's gathers."""
    edits, remat = [], problem.remat
    if layout.pp > 1 and not pipeline_parallel.keeps_activations(remat):
        remat = pipeline_parallel.WITHIN_A_TICK
        edits.append(pipeline_parallel.keep_within_a_tick)
    if layout.tp > 1:
        edits.append(
            tensor_parallel.split_layers(problem, placements, sequence_parallel=layout.sequence_parallel)
        )
    if _gathers_layers(problem, layout):
        edits.append(
            fully_sharded.gather_layers(
                placements[problem.stacked],
                remat=remat,
                reshard_after_forward=layout.reshard_after_forward,
            )
        )
    return edits


def _synchronize(gradients: Any, placements: Any, layout: Layout) -> Any:
    """Each device's own gradients, reduced over every axis along which they are parts of a sum."""
    gradients = fully_sharded.mean_gradients(gradients, placements)
    if layout.sequence_parallel:
        gradients = tensor_parallel.sum_partial_gradients(gradients, placements)
    if layout.pp > 1:
        gradients = pipeline_parallel.sum_tied_gradients(gradients, placements)
    method = layout.gradient_sync if layout.dp_replicate > 1 else "naive"
    # A bucket has leaves of one kind: joined with one that is split, a repeated one would count as split.
    return map_alike(
        lambda alike, _: data_parallel.synchronize_gradients(
            alike, method=method, bucket_mb=layout.bucket_mb
        ),
        placements,
        gradients,
    )
