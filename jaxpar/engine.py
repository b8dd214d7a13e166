"""An engine: the functions that `step.train_step` calls, and the shardings of its arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

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

Gradients = Callable[[Any, Any, jax.Array | None], tuple[tuple[jax.Array, Routing], Any]]
"""gradients(params, batch, scale) -> (mean loss, routing (A, L, ...)), mean gradients times `scale`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine:
    """An engine, made for an experiment and a mesh.

    Attributes:
        gradients: the mean loss of a batch and its synchronised gradients, sharded under ZeRO.
        norm: gradients -> their global norm, a scalar.
        to_shards: parameters -> the shards that this device updates.
        from_shards: updated shards -> parameters.
        placements: a tree of `Placement`s like the parameters.
        summed_microbatches: in float16, backward starts from the loss scale divided by this number. It
            counts the mean losses that are averaged after backward, per mean loss that is averaged before it.
        on_mesh: makes a step on global arrays of one that uses the four functions.
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
    summed_microbatches: float = 1
    on_mesh: Callable[[Callable[..., Any]], Callable[..., Any]] = identity
    ticks: Ticks | None = None
    compiler_options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def step(self) -> Callable[..., Any]:
        """`train_step` of this engine, on global arrays."""
        step = self.on_mesh(partial(train_step, self))
        return offload_moments(step, self.shards_sharding) if self._offloads else step

    @cached_property
    def params_sharding(self) -> Any:
        """Of the parameters between two steps, a tree."""
        return shardings(self.mesh, self.placements, sharded=self.experiment.layout.zero == 3)

    @cached_property
    def shards_sharding(self) -> Any:
        """Of the shards that devices update, and of the gradients that a step returns, a tree."""
        return shardings(self.mesh, self.placements, sharded=True)

    @property
    def accumulated_sharding(self) -> Any:
        """Of gradients as they accumulate over a batch, a tree."""
        return shardings(self.mesh, self.placements, sharded=self.experiment.layout.zero >= 2)

    @property
    def scalar_sharding(self) -> Sharding:
        """Of a scalar, which every device has."""
        return NamedSharding(self.mesh, P())

    @cached_property
    def batch_sharding(self) -> dict[str, Sharding]:
        """Of a step's arrays, by name."""
        specs = batch_specs(self.experiment, self.mesh)
        return {name: NamedSharding(self.mesh, spec) for name, spec in specs.items()}

    @property
    def metrics_sharding(self) -> dict[str, Sharding]:
        """Of a step's metrics, by name."""
        specs = metrics_specs(self.experiment, self.mesh)
        return {name: NamedSharding(self.mesh, spec) for name, spec in specs.items()}

    def state_sharding(self, params: Any) -> Any:
        """Of the optimizer's state between two steps, a tree like the state."""
        moments, init = self.shards_sharding, self.optimizer.init
        if self._offloads:
            moments = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), moments)
        return optax.tree_utils.tree_map_params(
            init,
            lambda _, sharding: sharding,
            jax.eval_shape(init, params),
            moments,
            transform_non_params=lambda _: self.scalar_sharding,
        )

    @property
    def _offloads(self) -> bool:
        return self.experiment.layout.offload == "optimizer"


def batch_specs(experiment: Experiment, mesh: Mesh) -> dict[str, P]:
    """PartitionSpecs of a step's arrays (A, B, ...). The axes of rows split B, the axes of positions T."""
    rows, sequence = _present(ROWS, mesh), _present(SEQUENCE, mesh)
    return {name: P(None, rows, None if name == "keys" else sequence) for name in shapes_of_step(experiment)}


def metrics_specs(experiment: Experiment, mesh: Mesh) -> dict[str, P]:
    """PartitionSpecs of a step's metrics. Expert ids are split as their tokens."""
    specs = {"loss": P(), "grad_norm": P()}
    if not experiment.model.n_experts:
        return specs
    sequence = (*SEQUENCE, TP) if experiment.layout.sequence_parallel else SEQUENCE
    expert_ids = P(None, None, _present(ROWS, mesh), _present(sequence, mesh))
    return specs | {"expert_ids": expert_ids, "tokens_per_expert": P()}


def _present(axes: Sequence[str], mesh: Mesh) -> tuple[str, ...] | None:
    """One dim of a PartitionSpec: the axes that have several devices."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1) or None
