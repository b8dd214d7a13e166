"""The engine jax-compiler: arrays are placed, and XLA decides what moves.

`parallelize` composes the strategies: the step is written as for one device, and each strategy has its say
about where its arguments live.
"""

from functools import partial
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.spec.axes import BATCH
from compare.spec.experiment import Layout
from jaxpar.comm.mesh import require_layout
from jaxpar.compiler import data_parallel, fully_sharded, pipeline_parallel, tensor_parallel
from jaxpar.loss_scale import scaled, unless_overflowed, unscaled
from jaxpar.optimizer import global_norm, moments
from jaxpar.problem import Edit, Loss, Problem
from jaxpar.tracing.edits import require_edits
from jaxpar.training_step import ShardedStep, accumulated_gradients, passes_of, shardings


def parallelize(
    problem: Problem, optimizer: optax.GradientTransformationExtraArgs, *, mesh: Mesh, layout: Layout
) -> ShardedStep:
    """The training step of a problem, as the compiler partitions it.

    Args:
        problem: the training problem.
        optimizer: of the form of `jaxpar.optimizer.make_optimizer`'s: it takes `grad_norm` and `scalars`.
        mesh: has the axes of `layout.axes`.
        layout: all of it but gradient_sync, which is the compiler's own choice.

    Raises:
        ExperimentError: the engine has no such schedule, or another part of the layout.
        TypeError: the optimizer's state is of another form than `make_optimizer`'s.
        ValueError: a mesh of another shape; a pipeline, and a problem without pieces. And from the step,
            when it is traced: the loss uses parameters past the edits (`jaxpar.tracing.edits`).
    """
    require_layout(layout, mesh, folder="compiler")
    moments(jax.eval_shape(optimizer.init, problem.shapes))
    placements = problem.place(layout, split=tensor_parallel.SPLIT)
    loss = _loss(problem, placements, mesh=mesh, layout=layout)
    shard = partial(fully_sharded.shard_parameters, placements=placements, mesh=mesh)
    # Gradients that accumulate whole (zero 0 and 1) can wait for the end, each device's own until then.
    late = BATCH if layout.zero < 2 else (data_parallel.AXIS,)
    accumulated = shardings(mesh, placements, sharded=layout.zero >= 2)
    gathers_layers = _gathers_layers(problem, layout)

    def gradients_of(params: Any, batch: Any, *, of: Loss):
        if layout.pp > 1:
            batch = pipeline_parallel.one_pass(batch, microbatches=layout.microbatches)
        return accumulated_gradients(of, params, batch, reduce=shard if layout.zero >= 2 else _same)

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        require_edits(problem, placements, batch, layout=layout, gathers_layers=gathers_layers)
        parts = 1 if layout.pp > 1 else passes_of(batch)  # a pipeline's loss is the mean over microbatches
        value, gradients = data_parallel.synchronize_gradients(
            partial(gradients_of, of=scaled(loss, scalars, parts=parts)),
            params,
            batch,
            mesh=mesh,
            axes=late,
            loops=layout.pp > 1,
        )
        gradients = shard(lax.with_sharding_constraint(gradients, accumulated))
        gradients = unscaled(gradients, scalars, parts=parts)
        grad_norm = global_norm(gradients)
        params = shard(params)
        updates, moved = optimizer.update(gradients, opt_state, params, grad_norm=grad_norm, scalars=scalars)
        after = (shard(optax.apply_updates(params, updates)), moved)
        params, opt_state = unless_overflowed(
            after, (params, opt_state), grad_norm=grad_norm, scalars=scalars
        )
        return params, opt_state, {"loss": value, "grad_norm": grad_norm}, gradients

    return ShardedStep(
        step=step,
        placements=placements,
        params=shardings(mesh, placements, sharded=layout.zero == 3),
        moments=shardings(mesh, placements, sharded=True),
        accumulated=accumulated,
        batch=data_parallel.batch_sharding(mesh),
        scalars=NamedSharding(mesh, P()),
    )


def _loss(problem: Problem, placements: Any, *, mesh: Mesh, layout: Layout) -> Loss:
    """The problem's loss over stored parameters: what tp splits, what dp_shard gathers, what pp spreads."""
    edits: list[Edit] = []
    stacked, is_gather = problem.stacked, None
    if layout.tp > 1:
        edits.append(
            tensor_parallel.split_layers(
                problem, placements, mesh=mesh, sequence_parallel=layout.sequence_parallel
            )
        )
    if _gathers_layers(problem, layout):
        stages = pipeline_parallel.AXIS if layout.pp > 1 else None
        is_gather = fully_sharded.gather_of_layer(placements[stacked], mesh=mesh, stages=stages)
        edits.append(
            fully_sharded.gather_layers(
                placements[stacked],
                mesh=mesh,
                remat=problem.remat,
                reshard_after_forward=layout.reshard_after_forward,
                is_gather=is_gather,
            )
        )
    if layout.pp > 1:
        loss = pipeline_parallel.pipelined(
            problem.edited_pieces(edits),
            mesh=mesh,
            stacked=stacked,
            chunks=layout.chunks,
            remat=problem.remat,
            is_gather=is_gather,
        )
    else:
        loss = problem.edited(edits)
    if layout.zero == 3:
        return fully_sharded.gather_non_layer_parameters(
            loss, placements, mesh=mesh, stacked=stacked, layers_too=layout.pp > 1 and not is_gather
        )
    return lambda params, batch: loss(fully_sharded.unpad(params, placements), batch)


def _gathers_layers(problem: Problem, layout: Layout) -> bool:
    """True if layers are stored as shards that each gathers for itself.

    A pipeline's layers run at every tick: what is to be kept of them is gathered up front, with the rest.
    """
    up_front = layout.pp > 1 and not layout.reshard_after_forward
    return layout.zero == 3 and problem.stacked in problem.shapes and not up_front


def _same(tree: Any) -> Any:
    return tree
