"""The engine jax-explicit: where an array lives is part of its type, and JAX checks it when it traces.

`parallelize` composes the strategies: the step is written as for one device, and where types differ, a cast
says what becomes of it. XLA moves what casts ask for; what no cast asks for is an error.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from compare.spec.experiment import Layout
from jaxpar.comm.mesh import require_layout, typed
from jaxpar.explicit import data_parallel, fully_sharded, pipeline_parallel, tensor_parallel
from jaxpar.explicit.replicas import axes_of_replicas, reduced, unreduced
from jaxpar.loss_scale import scaled, unless_overflowed, unscaled
from jaxpar.optimizer import global_norm, moments
from jaxpar.placement import specs
from jaxpar.problem import Edit, Loss, Problem
from jaxpar.tracing.edits import require_edits
from jaxpar.training_step import ShardedStep, accumulated_gradients, passes_of, shardings


def parallelize(
    problem: Problem, optimizer: optax.GradientTransformationExtraArgs, *, mesh: Mesh, layout: Layout
) -> ShardedStep:
    """The training step of a problem, typed.

    Args:
        problem: what is trained.
        optimizer: of the form of `jaxpar.optimizer.make_optimizer`'s: it takes `grad_norm` and `scalars`.
        mesh: has the axes of `layout.axes`, of any type: they are made explicit.
        layout: all of it but gradient_sync: gradients are summed once.

    Raises:
        ExperimentError: the engine has no such schedule, or another part of the layout.
        TypeError: the optimizer's state is of another form than `make_optimizer`'s. And from the step, when
            it is traced: JAX's ShardingTypeError, for an operation whose types leave open what it sends.
        ValueError: a mesh of another shape. And from the step: the loss uses parameters past the edits
            (`jaxpar.tracing.edits`).
    """
    require_layout(layout, mesh, folder="explicit")
    moments(jax.eval_shape(optimizer.init, problem.shapes))
    mesh = typed(mesh)
    placements = problem.place(layout, split=tensor_parallel.SPLIT)
    loss = _loss(problem, placements, mesh=mesh, layout=layout)
    at_rest = layout.zero == 3
    scatter = partial(fully_sharded.scatter_gradients, placements=placements, mesh=mesh)
    gathers_layers = _gathers_layers(problem, layout)

    def synchronize(gradients: Any) -> Any:
        gradients = scatter(gradients) if layout.zero else gradients
        return data_parallel.synchronize_gradients(gradients, placements, sharded=layout.zero > 0)

    def mean_gradients(params: Any, batch: Any, scalars: Any) -> tuple[jax.Array, Any]:
        parts = 1 if layout.pp > 1 else passes_of(batch)  # a pipeline's loss is the mean over microbatches
        parts /= layout.data_parallel  # each replica's backward begins with its own mean
        if layout.pp > 1:
            batch = pipeline_parallel.one_pass(batch, microbatches=layout.microbatches)
        params = reshard(params, reduced(placements, sharded=at_rest, mesh=mesh))
        value, gradients = accumulated_gradients(
            scaled(loss, scalars, parts=parts),
            params,
            batch,
            reduce=scatter if layout.zero >= 2 else _same,
            finish=synchronize,
            like=_zeros(params, unreduced(placements, sharded=layout.zero >= 2, mesh=mesh)),
        )
        return value, unscaled(gradients, scalars, parts=parts)

    def update(params: Any, opt_state: Any, gradients: Any, scalars: Any) -> tuple[Any, Any, jax.Array]:
        grad_norm = global_norm(gradients)
        before = fully_sharded.shard_parameters(params, placements)
        updates, moved = optimizer.update(gradients, opt_state, before, grad_norm=grad_norm, scalars=scalars)
        after = (optax.apply_updates(before, updates), moved)
        after = unless_overflowed(after, (before, opt_state), grad_norm=grad_norm, scalars=scalars)
        return reshard(after[0], specs(placements, sharded=at_rest)), after[1], grad_norm

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        require_edits(problem, placements, batch, layout=layout, gathers_layers=gathers_layers)
        with use_abstract_mesh(mesh.abstract_mesh):
            batch = reshard(batch, P(None, axes_of_replicas(mesh) or None))
            value, gradients = mean_gradients(params, batch, scalars)
            params, opt_state, grad_norm = update(params, opt_state, gradients, scalars)
        return params, opt_state, {"loss": value, "grad_norm": grad_norm}, gradients

    return ShardedStep(
        step=step,
        placements=placements,
        params=shardings(mesh, placements, sharded=at_rest),
        moments=shardings(mesh, placements, sharded=True),
        accumulated=shardings(mesh, placements, sharded=layout.zero >= 2),
        batch=data_parallel.batch_sharding(mesh),
        scalars=NamedSharding(mesh, P()),
    )


def _loss(problem: Problem, placements: Any, *, mesh: Mesh, layout: Layout) -> Loss:
    """The problem's loss over stored parameters: what tp splits, what dp_shard gathers, what pp spreads."""
    edits: list[Edit] = []
    stacked, gathers_layers = problem.stacked, _gathers_layers(problem, layout)
    if layout.tp > 1:
        edits.append(
            tensor_parallel.split_layers(problem, placements, sequence_parallel=layout.sequence_parallel)
        )
    if gathers_layers:
        edits.append(
            fully_sharded.gather_layers(
                placements[stacked],
                mesh=mesh,
                remat=problem.remat,
                reshard_after_forward=layout.reshard_after_forward,
            )
        )
    whole = {key: p for key, p in placements.items() if key != stacked or not gathers_layers}
    if layout.pp > 1:
        loss = pipeline_parallel.pipelined(
            problem.edited_pieces(edits),
            mesh=mesh,
            stacked=stacked,
            chunks=layout.chunks,
            remat=problem.remat,
            is_gather=fully_sharded.is_gather if gathers_layers else None,
        )
    else:
        loss = problem.edited(edits)

    def unpadded(params: Any, batch: Any) -> jax.Array:
        own = {}
        for key, p in whole.items():
            unpad = partial(fully_sharded.unpad, placements=p)
            has_stages = layout.pp > 1 and key != stacked  # a copy of what is in no layer for each stage
            own[key] = (jax.vmap(unpad) if has_stages else unpad)(params[key])
        return loss({**params, **own}, batch)

    loss_of_all = data_parallel.each_replica(unpadded, mesh=mesh, rows_dim=1 if layout.pp > 1 else 0)
    if layout.zero == 3:
        return fully_sharded.gather_non_layer_parameters(loss_of_all, whole, mesh=mesh)
    return loss_of_all


def _gathers_layers(problem: Problem, layout: Layout) -> bool:
    """True if layers are stored as shards that each gathers for itself.

    A pipeline's layers run at every tick: what is to be kept of them is gathered up front, with the rest.
    """
    up_front = layout.pp > 1 and not layout.reshard_after_forward
    return layout.zero == 3 and problem.stacked in problem.shapes and not up_front


def _zeros(params: Any, types: Any) -> Any:
    """Zeros like parameters, of the types of unreduced gradients."""
    return jax.tree.map(
        lambda w, spec: reshard(jnp.zeros(w.shape, w.dtype, out_sharding=P(*spec.partitions)), spec),
        params,
        types,
    )


def _same(tree: Any) -> Any:
    return tree
