"""The training step that an engine makes, the strategies that it is made of, and compiling it.

Loss scaling (`compare.numerics.loss_scale`) is inside the step, where its scalars have a `loss_scale`:
backward starts from it, gradients are divided by it, and a step whose gradients overflowed changes nothing.
So that all engines skip the same steps, backward of a part of the batch starts from its share of the mean.

Legend: A gradient accumulation, B batch, T position, L layers; E experts, of which a token has k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from compare.numerics.optimizer import step_scalars
from compare.numerics.parameters import storage_dtype
from compare.numerics.stream import shapes_of_step
from compare.pipeline.ticks import Ticks
from compare.side.recording import Progress
from compare.spec.axes import ROWS, SEQUENCE, TP
from compare.spec.experiment import Experiment
from jaxpar.comm.hosts import fetch
from jaxpar.hooks import identity
from jaxpar.mlp import Routing
from jaxpar.model import Loss
from jaxpar.placement import shardings

HOST = "pinned_host"


@dataclass(frozen=True, kw_only=True)
class ShardedStep:
    """One training step over a mesh, and where its arguments live."""

    step: Callable[..., Any]
    """step(params, opt_state, batch, scalars) -> (params, opt_state, `metrics_of` it, gradients).

    `batch` is a dict of (A, B, T); `gradients` are synchronised and unclipped: only a ladder asks for them.
    """
    placements: Any
    """A tree of `Placement`s like the parameters: how true arrays are padded into stored ones."""
    # Trees of shardings like the parameters: of these, of each moment between two steps, of the gradients
    # that the step returns, and of gradients as they accumulate over a batch.
    params: Any
    moments: Any
    gradients: Any
    accumulated: Any
    batch: dict[str, Sharding]
    scalars: Sharding
    metrics: dict[str, Sharding] = field(default_factory=dict)
    ticks: Ticks | None = None
    """The schedule of a pipeline by hand."""
    compiler_options: dict[str, Any] = field(default_factory=dict)

    def unpad(self, tree: Any) -> Any:
        """Stored arrays, fetched to the host, without their padding."""
        return jax.tree.map(lambda p, x: p.unpad(x), self.placements, fetch(tree))


@dataclass(kw_only=True)
class TrainState(Progress):
    """How far training has come; weights and moments on the devices, which a step donates."""

    params: Any
    opt_state: Any
    gradients: Any = None
    """Of a step whose update is kept for the ladder, synchronised and unclipped; else None."""
    experts: Any = None
    """Of such a step, of a model that has them: those of each token, (A, L, B, T, k)."""


def place_step(
    step: Callable[..., Any], experiment: Experiment, placements: Any, *, mesh: Mesh, **options: Any
) -> ShardedStep:
    """The step, with its arguments where all engines keep them; `options` are further fields."""
    zero, shards = experiment.layout.zero, shardings(mesh, placements, sharded=True)
    return ShardedStep(
        step=step,
        placements=placements,
        params=shardings(mesh, placements, sharded=zero == 3),
        moments=shards,
        gradients=shards,
        accumulated=shardings(mesh, placements, sharded=zero >= 2),
        batch={name: NamedSharding(mesh, spec) for name, spec in batch_specs(experiment, mesh).items()},
        scalars=NamedSharding(mesh, P()),
        metrics={name: NamedSharding(mesh, spec) for name, spec in metrics_specs(experiment, mesh).items()},
        **options,
    )


def batch_specs(experiment: Experiment, mesh: Mesh) -> dict[str, P]:
    """PartitionSpecs of a step's arrays (A, B, ..): axes of rows split B, that of positions T."""
    rows, sequence = present(ROWS, mesh), present(SEQUENCE, mesh)
    return {name: P(None, rows, None if name == "keys" else sequence) for name in shapes_of_step(experiment)}


def present(axes: Sequence[str], mesh: Mesh) -> tuple[str, ...] | None:
    """A part of a PartitionSpec: those of the axes that have several devices."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1) or None


def metrics_specs(experiment: Experiment, mesh: Mesh) -> dict[str, P]:
    """PartitionSpecs of `metrics_of` a step: those of a token's experts as of the token."""
    specs = {"loss": P(), "grad_norm": P()}
    if not experiment.model.n_experts:
        return specs
    sequence = (*SEQUENCE, TP) if experiment.layout.sequence_parallel else SEQUENCE
    experts = P(None, None, present(ROWS, mesh), present(sequence, mesh))
    return specs | {"experts": experts, "tokens_per_expert": P()}


def passes_of(batch: Any) -> int:
    """A: how many passes are accumulated over a batch of (A, B, ...)."""
    return jax.tree.leaves(batch)[0].shape[0]


def accumulated_gradients(
    loss: Loss,
    params: Any,
    batch: Any,
    *,
    reduce: Callable[[Any], Any] = identity,
    finish: Callable[[Any], Any] = identity,
    like: Any = None,
) -> tuple[tuple[jax.Array, Routing], Any]:
    """Mean loss and its gradients over the A microbatches of a batch (A, B, ...), one at a time.

    With the loss go the routing of all, (A, L, ...). `reduce` is applied to the gradients of each before they
    are added up, to zeros like `like` (`params` by default); `finish` to the sum, before it is divided by A.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    accumulation = passes_of(batch)
    if accumulation == 1:
        (value, routing), gradients = value_and_grad(params, jax.tree.map(lambda x: x[0], batch))
        return (value, jax.tree.map(lambda x: x[None], routing)), finish(reduce(gradients))

    def add(total: Any, microbatch: Any) -> tuple[Any, tuple[jax.Array, Routing]]:
        value, gradients = value_and_grad(params, microbatch)
        return jax.tree.map(lax.add, total, reduce(gradients)), value

    zeros = jax.tree.map(jnp.zeros_like, params if like is None else like)
    total, (losses_A, routing) = lax.scan(add, zeros, batch)
    return (losses_A.mean(), routing), jax.tree.map(lambda g: g / accumulation, finish(total))


def metrics_of(value: tuple[jax.Array, Routing], grad_norm: jax.Array) -> dict[str, jax.Array]:
    """What a step tells: loss and grad_norm; of experts, int32, those of each token, "experts" (A, L, B, T,
    k), and how often each was chosen, "tokens_per_expert" (L, E)."""
    loss, routing = value
    metrics = {"loss": loss, "grad_norm": grad_norm}
    if routing.tokens_per_expert is None:
        return metrics
    return metrics | {
        "experts": routing.expert_ids,
        "tokens_per_expert": routing.tokens_per_expert.sum(axis=0),
    }


_scale_gradient = jax.custom_vjp(lambda value, scale: value)
_scale_gradient.defvjp(
    lambda value, scale: (value, scale),
    lambda scale, gradient: (gradient * scale, None),
)


def scaled(
    loss: Callable[..., tuple[jax.Array, Routing]], scalars: dict[str, Any], *, parts: float = 1
) -> Callable[..., tuple[jax.Array, Routing]]:
    """The loss, the mean over a microbatch, with gradients multiplied by the scale over `parts`.

    `parts` is how many microbatches' means are averaged, over the replicas whose mean the loss already is.
    """
    if "loss_scale" not in scalars:
        return loss

    def scaled_loss(*arguments: Any) -> tuple[jax.Array, Routing]:
        value, routing = loss(*arguments)
        return _scale_gradient(value, scalars["loss_scale"] / parts), routing

    return scaled_loss


def unscaled(gradients: Any, scalars: dict[str, Any], *, parts: float = 1) -> Any:
    """Gradients of a scaled loss over its scale; an overflow stays infinite or NaN."""
    if "loss_scale" not in scalars:
        return gradients
    return jax.tree.map(lambda g: g / (scalars["loss_scale"] / parts), gradients)


def updated(
    optimizer: optax.GradientTransformationExtraArgs,
    params: Any,
    opt_state: Any,
    gradients: Any,
    *,
    grad_norm: jax.Array,
    scalars: dict[str, Any],
) -> tuple[Any, Any]:
    """Parameters and moments after an update; as they were if scaled gradients overflowed."""
    updates, moments = optimizer.update(gradients, opt_state, params, grad_norm=grad_norm, scalars=scalars)
    after = (optax.apply_updates(params, updates), moments)
    if "loss_scale" not in scalars:
        return after
    is_finite = jnp.isfinite(grad_norm)
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, (params, opt_state))


def with_moments_on_host(sharded: ShardedStep) -> ShardedStep:
    """Offload: the step with moments read from the host's memory and written back there, when XLA likes.

    On a CPU host and device are one memory: XLA knows the two kinds, and leaves the copies out.
    """
    at_rest = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), sharded.moments)

    def moved(moments: Any, where: Any) -> Any:
        return jax.device_put(moments, dict.fromkeys(moments, where))

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any) -> Any:
        params, opt_state, *rest = sharded.step(params, moved(opt_state, sharded.moments), batch, scalars)
        return params, moved(opt_state, at_rest), *rest

    return replace(sharded, step=step, moments=at_rest)


Output = Literal["state", "state and gradients", "loss"]
"""What a compiled step returns: in training; for the ladder (else gradients never leave the step); and in an
evaluation, without dropout, of which XLA leaves out all but the loss."""


def trace_step(
    sharded: ShardedStep, state: TrainState, experiment: Experiment, output: Output = "state"
) -> Any:
    """The sharded step, traced for ahead-of-time compilation; a state that it returns anew is donated."""

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any) -> Any:
        params, opt_state, metrics, gradients = sharded.step(params, opt_state, batch, scalars)
        if output == "loss":
            return metrics["loss"]
        metrics = {name: metrics[name] for name in told}
        return params, opt_state, metrics, gradients if output == "state and gradients" else None

    batch, told = batch_like(experiment), sharded.metrics
    if output == "state":
        told = {name: sharding for name, sharding in told.items() if name != "experts"}
    moments = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    returned, donated = (sharded.params, moments, told, sharded.gradients), (0, 1)
    if output == "state":
        returned = (*returned[:3], None)
    elif output == "loss":
        returned, donated = sharded.scalars, ()
        batch.pop("keys", None)
    in_shardings = (sharded.params, moments, {x: sharded.batch[x] for x in batch}, sharded.scalars)
    jitted = jax.jit(step, in_shardings=in_shardings, out_shardings=returned, donate_argnums=donated)
    return jitted.trace(state.params, state.opt_state, batch, device_scalars(experiment, state))


def compile_step(
    sharded: ShardedStep, state: TrainState, experiment: Experiment, output: Output = "state"
) -> jax.stages.Compiled:
    """`trace_step`, compiled."""
    traced = trace_step(sharded, state, experiment, output)
    return traced.lower().compile(compiler_options=sharded.compiler_options)


def batch_like(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of one step's arrays, without data."""
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes_of_step(experiment).items()}


def device_scalars(experiment: Experiment, progress: Progress) -> dict[str, np.ndarray]:
    """The next step's scalars, of optimizer and loss scale, rounded once to the dtype of the weights."""
    scalars = step_scalars(experiment.optimizer, progress.step, progress.updates)
    if progress.loss_scale:
        scalars["loss_scale"] = progress.loss_scale.scale
    dtype = storage_dtype(experiment)
    return {name: np.asarray(value, dtype) for name, value in scalars.items()}
