"""The engine jax-manual: the whole step runs per device inside one shard_map, and we write every collective.

`parallelize` composes the strategies, in the order in which a step meets them.
"""

from typing import Any

import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.contract.experiment import Layout
from jaxpar import collectives
from jaxpar.manual import data_parallel, fully_sharded, tensor_parallel
from jaxpar.manual.norm import global_norm
from jaxpar.optimizer import state_like
from jaxpar.placement import map_alike, specs
from jaxpar.plan import Loss, Plan, Problem, accumulated_gradients, shardings

REPLICATE, SHARD = data_parallel.AXIS, fully_sharded.AXIS


def parallelize(
    problem: Problem, optimizer: optax.GradientTransformationExtraArgs, *, mesh: Mesh, layout: Layout
) -> Plan:
    """The training step of a problem, with the layout's collectives written out.

    Args:
        problem: its loss runs on each device, on its share of the batch.
        optimizer: takes `grad_norm` and `scalars` (`jaxpar.optimizer`).
        mesh: has the axes of `layout.axes`.
        layout: all of it.
    """
    placements = problem.place(layout, split=tensor_parallel.SPLIT)
    loss = _loss(problem, placements, layout)
    # One replica: a psum over one device is nothing, and XLA removes it.
    method = layout.gradient_sync if layout.dp_replicate > 1 else "naive"

    def gradients_of(params: Any, batch: Any):
        """This device's part of the mean loss and of its gradients, reduced over nothing but dp_shard."""
        local = collectives.to_varying(params, REPLICATE)
        local = fully_sharded.own_copies(local, placements, stage=layout.zero)
        if layout.sequence_parallel:
            local = tensor_parallel.own_copies(local, placements)
        if layout.zero != 2:
            value, gradients = accumulated_gradients(loss, local, batch)
            if layout.zero == 3:
                return value, gradients
            return value, fully_sharded.scatter_gradients(gradients, placements)
        return accumulated_gradients(
            loss,
            local,
            batch,
            reduce=lambda gradients: fully_sharded.scatter_gradients(gradients, placements),
            like=fully_sharded.own_shards(local, placements),
        )

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        value, gradients = gradients_of(params, batch)
        gradients = fully_sharded.mean_gradients(gradients, placements)
        if layout.sequence_parallel:
            gradients = tensor_parallel.sum_partial_gradients(gradients, placements)
        # A bucket has leaves of one kind: joined with one that is split, a repeated one would count as split.
        gradients = map_alike(
            lambda alike, _: data_parallel.synchronize_gradients(
                alike, method=method, bucket_mb=layout.bucket_mb
            ),
            placements,
            gradients,
        )
        grad_norm = global_norm(gradients, placements)
        shards = params if layout.zero == 3 else fully_sharded.own_shards(params, placements)
        updates, opt_state = optimizer.update(
            gradients, opt_state, shards, grad_norm=grad_norm, scalars=scalars
        )
        shards = optax.apply_updates(shards, updates)
        params = shards if layout.zero == 3 else fully_sharded.whole_again(shards, placements)
        metrics = {"loss": collectives.all_reduce_mean(value, (REPLICATE, SHARD)), "grad_norm": grad_norm}
        return params, opt_state, metrics, gradients

    batch_spec = P(None, (REPLICATE, SHARD))
    at_rest = specs(placements, sharded=layout.zero == 3)
    sharded = specs(placements, sharded=True)
    moments = state_like(optimizer, problem.shapes, sharded)
    return Plan(
        step=collectives.per_device(
            step,
            mesh=mesh,
            in_specs=(at_rest, moments, batch_spec, P()),
            out_specs=(at_rest, moments, P(), sharded),
        ),
        placements=placements,
        params=shardings(mesh, placements, sharded=layout.zero == 3),
        moments=shardings(mesh, placements, sharded=True),
        accumulated=shardings(mesh, placements, sharded=layout.zero >= 2),
        batch=NamedSharding(mesh, batch_spec),
        scalars=NamedSharding(mesh, P()),
        compiler_options=collectives.KEEP_COLLECTIVES_APART,
    )


def _loss(problem: Problem, placements: Any, layout: Layout) -> Loss:
    """The problem's loss over one device's stored parameters: what tp splits, then what dp_shard gathers."""
    edits, zero3 = [], layout.zero == 3
    if layout.tp > 1:
        edits.append(
            tensor_parallel.split_modules(
                sequence_parallel=layout.sequence_parallel, vocab_size=problem.vocab_size
            )
        )
    if zero3:
        edits.append(
            fully_sharded.gather_layers(
                placements[problem.stacked],
                remat=problem.remat,
                reshard_after_forward=layout.reshard_after_forward,
            )
        )
    loss = problem.edited(edits)
    if zero3:
        return fully_sharded.gather_the_rest(loss, placements, stacked=problem.stacked)
    return lambda params, batch: loss(fully_sharded.strip_padding(params, placements), batch)
