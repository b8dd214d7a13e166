"""An engine: the functions that `step.train_step` calls, and the shardings of its arguments and results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from compare.numerics.stream import shapes_of_step
from compare.pipeline.ticks import Ticks
from compare.spec.axes import ROWS, SEQUENCE, TP
from compare.spec.experiment import Experiment
from jaxpar.hooks import identity
from jaxpar.mlp import Routing
from jaxpar.offload import HOST, offload_moments
from jaxpar.optimizer import Optimizer
from jaxpar.placement import shardings
from jaxpar.step import train_step
from jaxpar.weights import parameter_shapes

Gradients = Callable[[Any, Any, jax.Array | None], tuple[tuple[jax.Array, Routing], Any]]
"""gradients(params, batch, scale) -> (mean loss, routing (A, L, ...)), mean gradients times `scale`."""


class Shardings(NamedTuple):
    """Shardings of the arrays that programs take and return: trees like the arrays, and one for scalars."""

    params: Any
    opt_state: Any
    gradients: Any
    """Gradients that a step returns, and the shards that devices update."""
    accumulated: Any
    """Gradients as they accumulate over a batch."""
    batch: dict[str, Sharding]
    metrics: dict[str, Sharding]
    scalar: Sharding


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine:
    """An engine, made for an experiment and a mesh.

    Attributes:
        gradients: the mean loss of a batch and its synchronised gradients, sharded under ZeRO.
        norm: gradients -> their global norm, a scalar.
        to_shards: parameters -> the shards that devices update.
        from_shards: updated shards -> parameters.
        placements: a tree of `Placement`s like the parameters.
        averaged_losses: the number of mean losses whose gradients are averaged after backward, over passes,
            microbatches and devices. In float16, backward starts from the loss scale divided by it.
        on_mesh: (a step that uses the four functions, shardings) -> a step on global arrays.
        ticks: the schedule of jax-manual's pipeline.
    """

    gradients: Gradients
    norm: Callable[[Any], jax.Array]
    to_shards: Callable[[Any], Any] = identity
    from_shards: Callable[[Any], Any] = identity
    optimizer: Optimizer
    experiment: Experiment
    mesh: Mesh
    placements: Any
    averaged_losses: int = 1
    on_mesh: Callable[[Callable[..., Any], Shardings], Callable[..., Any]] = lambda step, _: step
    ticks: Ticks | None = None
    compiler_options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def train_step(self) -> Callable[..., Any]:
        """`train_step` of this engine, on global arrays."""
        step = self.on_mesh(partial(train_step, self), self.shardings)
        offloads = self.experiment.layout.offload == "optimizer"
        return offload_moments(step, self.shardings.gradients) if offloads else step

    @cached_property
    def shardings(self) -> Shardings:
        """The shardings of this engine's arrays."""
        experiment, layout = self.experiment, self.experiment.layout
        shards, scalar = shardings(self.mesh, self.placements, sharded=True), NamedSharding(self.mesh, P())
        moments = shards
        if layout.offload == "optimizer":
            moments = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shards)
        init = self.optimizer.init
        opt_state = optax.tree_utils.tree_map_params(
            init,
            lambda _, sharding: sharding,
            jax.eval_shape(init, parameter_shapes(experiment)),
            moments,
            transform_non_params=lambda _: scalar,
        )

        def named(specs: Mapping[str, P]) -> dict[str, Sharding]:
            return {name: NamedSharding(self.mesh, spec) for name, spec in specs.items()}

        return Shardings(
            params=shardings(self.mesh, self.placements, sharded=layout.zero == 3),
            opt_state=opt_state,
            gradients=shards,
            accumulated=shardings(self.mesh, self.placements, sharded=layout.zero >= 2),
            batch=named(batch_specs(experiment)),
            metrics=named(metrics_specs(experiment)),
            scalar=scalar,
        )


def batch_specs(experiment: Experiment) -> dict[str, P]:
    """PartitionSpecs of a step's arrays (A, B, ...). The axes of rows split B, the axes of positions T."""
    rows, sequence = present(ROWS, experiment), present(SEQUENCE, experiment)
    return {name: P(None, rows, None if name == "keys" else sequence) for name in shapes_of_step(experiment)}


def metrics_specs(experiment: Experiment) -> dict[str, P]:
    """PartitionSpecs of a step's metrics. Expert ids are split as their tokens."""
    specs = {"loss": P(), "grad_norm": P()}
    if not experiment.model.n_experts:
        return specs
    sequence = (*SEQUENCE, TP) if experiment.layout.sequence_parallel else SEQUENCE
    expert_ids = P(None, None, present(ROWS, experiment), present(sequence, experiment))
    return specs | {"expert_ids": expert_ids, "tokens_per_expert": P()}


def present(axes: Sequence[str], experiment: Experiment) -> tuple[str, ...] | None:
    """One dim of a PartitionSpec: the axes that have several devices."""
    return tuple(axis for axis in axes if experiment.layout.axes[axis] > 1) or None
