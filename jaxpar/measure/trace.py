"""Trace of a step: the output of each place of the model, and its gradient (`compare.contract.trace`).

The traced program is the engine's step with another loss, `traced_loss`. This loss adds zeros to the output
of each place. Its derivatives by the zeros are the gradients of the outputs. The scan over layers slices the
zeros of the blocks, and returns the outputs of the blocks. Hooks, messages and rematerialisation are as in
training. Parameters have no gradient here, so XLA leaves out the reductions of their gradients.

`trace_step` makes this program. The training step is another program, and does not change.

Legend: A passes, L layers, B rows, T positions.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from compare.contract.trace import LOSS, ROUTER
from compare.numerics.parameters import storage_dtype
from compare.numerics.stream import arrays_of_step
from compare.spec.axes import ROWS, SEQUENCE, TP
from compare.spec.experiment import Experiment, Model
from jaxpar.comm.hosts import to_host
from jaxpar.dropout import Noise
from jaxpar.engine import Engine, present
from jaxpar.hooks import Hooks
from jaxpar.mlp import Routing
from jaxpar.model import Loss, loss_function
from jaxpar.programs import compile_program
from jaxpar.run import Run

ATTENTION = ("norm1", "attention.qkv", "attention.core", "attention.out", "norm2")
ENDS = ("embedding", "norm", LOSS)
"""Places outside the blocks."""
Whole = dict[str, np.ndarray]
"""Whole tensors (A, B, T, ...) by the names of the contract."""


def trace_step(run: Run, make_engine: Callable[..., Engine]) -> tuple[Whole, Whole]:
    """Forward and backward of the next step, in every process. All processes call it together.

    `make_engine` is `train.make_engine`.
    """
    experiment, state = run.experiment, run.state
    scale = state.loss_scale.scale if state.loss_scale else 1.0
    loss_of = partial(traced_loss, start=scale / run.engine.averaged_losses)
    engine = make_engine(run.request.engine, experiment, run.engine.mesh, loss_of)
    batch = run.shard_batch(arrays_of_step(run.corpus, experiment, state.step))
    forward, backward = to_host(compile_trace(engine, state.params, batch)(state.params, batch))
    whole = partial(by_place, order_T=run.order_T, layers=experiment.model.n_layer)
    passes, dtype = experiment.train.gradient_accumulation_steps, storage_dtype(experiment)
    unscaled = {place: gradient.astype(dtype) / scale for place, gradient in backward.items()}
    outputs, gradients = whole(forward), whole(unscaled)
    for name in gradients:
        if name.endswith(ROUTER):  # every expert computes every token
            gradients[name] = np.where(outputs[name] > 0, gradients[name], 0)
    return outputs, gradients | {LOSS: np.full(passes, 1 / passes)}


def compile_trace(engine: Engine, params: Any, batch: Any) -> jax.stages.Compiled:
    """The traced program of an engine with `traced_loss`: (params, batch) -> outputs and gradients.

    Both are global arrays (A, L, B, T, ...) by place, with L = 1 outside the blocks. Positions are in the
    order of the devices.
    """
    specs = specs_of_places(engine.experiment)
    where: dict[str, Sharding] = {place: NamedSharding(engine.mesh, spec) for place, spec in specs.items()}
    shardings = engine.shardings._replace(opt_state={}, metrics=where, gradients=where)

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any) -> tuple[Any, Any, Any, Any]:
        (_, routing), _ = engine.gradients(params, batch, None)
        return params, opt_state, *routing.expert_ids

    traced_step = engine.on_mesh(step, shardings)
    jitted = jax.jit(lambda params, batch: traced_step(params, {}, batch, {})[2:])
    with jax.set_mesh(engine.mesh):
        return compile_program(engine, jitted.trace(params, batch))


def specs_of_places(experiment: Experiment) -> dict[str, P]:
    """PartitionSpecs of the outputs (A, L, B, T, ...) of each place; each device has one `loss`."""
    layout, model = experiment.layout, experiment.model
    split = (*SEQUENCE, TP) if layout.sequence_parallel else SEQUENCE
    stream = P(None, None, present(ROWS, experiment), present(split, experiment))
    inside = *stream[:3], present(SEQUENCE, experiment)
    tp = present((TP,), experiment)
    others = {
        "attention.qkv": P(*inside, None, tp) if model.group == 1 else P(*inside, tp),
        "attention.core": P(*inside, tp),
        "mlp.up": P(*inside, tp),
        LOSS: P(*inside),
    }
    return {place: others.get(place, stream) for place in (*ENDS, *places_of_block(model))}


def places_of_block(model: Model) -> tuple[str, ...]:
    """Names of the places in a block."""
    second = (ROUTER, "mlp.experts") if model.n_experts else ("mlp.up", "mlp.down")
    return *ATTENTION, *second, "residual"


def by_place(arrays: dict[str, np.ndarray], *, order_T: np.ndarray, layers: int) -> Whole:
    """Whole tensors by the contract's names, from arrays (A, L, B, T, ...) in the order of the devices."""
    back_T, whole = order_T.argsort(), {}
    for place, x_ALBT in arrays.items():
        if place == LOSS:
            whole[LOSS] = x_ALBT.mean(axis=(1, 2, 3))
        elif place in ENDS:
            whole[place] = x_ALBT[:, 0].take(back_T, axis=2)
        else:
            of_layer = {f"blocks.{layer}.{place}": x_ALBT[:, layer] for layer in range(layers)}
            whole |= {name: x_ABT.take(back_T, axis=2) for name, x_ABT in of_layer.items()}
    return whole


def traced_loss(experiment: Experiment, hooks: Hooks, *, start: float) -> Loss:
    """A loss that returns a trace in place of expert ids, and has no gradient of the parameters.

    The trace is outputs and gradients (L, B, T, ...) by place. Backward starts from the loss times `start`.
    """
    blocks = places_of_block(experiment.model)

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        params = lax.stop_gradient(params)

        def forward(zeros: dict[str, Any]) -> tuple[jax.Array, Any]:
            seen: dict[str, jax.Array] = {}
            watch = partial(watch_model, zeros=zeros, seen=seen)
            value, _ = loss_function(experiment, hooks, watch)(params, batch)
            return value * start, (value, seen | {LOSS: value[None, None]})

        # Zeros have the shape and the type of their output. XLA leaves this first forward out.
        numbers = {place: jnp.zeros(experiment.model.n_layer) for place in blocks} | dict.fromkeys(ENDS, 0.0)
        zeros = jax.tree.map(jnp.zeros_like, forward(numbers)[1][1])
        gradients, (value, outputs) = jax.grad(forward, has_aux=True)(zeros)
        trace = [
            {name: x[None] if name in ENDS else x for name, x in t.items()} for t in (outputs, gradients)
        ]
        return value, Routing(tuple(trace))

    return loss


def watch_model(model: Any, *, zeros: dict[str, Any], seen: dict[str, jax.Array]) -> Any:
    """The GPT, changed: each place adds its zeros to its output. `seen` gets the sums when the model runs."""
    at, layers, gather = partial(observe, zeros, seen), model.layers, model.hooks.gather_layer

    def traced_layers(*arguments: Any) -> tuple[jax.Array, Any]:
        x_BTC, (routing, outputs) = layers(*arguments)
        seen.update(outputs)
        return x_BTC, routing

    def gather_layer(layer: Any, x_BTC: jax.Array) -> Any:
        """Gather the parameters of a layer, and not its zeros."""
        return {**layer, "block": gather(layer["block"], x_BTC)}

    model.embed = then(model.embed, partial(at, "embedding"))
    model.norm = then(model.norm, partial(at, "norm"))
    model.layers = traced_layers
    model.blocks = TracedBlock(model.blocks, {place: x for place, x in zeros.items() if place not in ENDS})
    model.hooks = replace(model.hooks, gather_layer=gather_layer)
    return model


class TracedBlock(nnx.Module):
    """Block with zeros for each of its places; or stacked blocks, with zeros (L, ...)."""

    def __init__(self, block: Any, zeros: dict[str, jax.Array]):
        self.block = block
        self.zeros = nnx.data({place: nnx.Variable(x) for place, x in zeros.items()})

    def __call__(self, x_BTC: jax.Array, noise: Noise | None = None) -> tuple[jax.Array, Any]:
        """The residual stream after the block, and its routing with the outputs of its places."""
        block, seen = self.block, dict[str, jax.Array]()
        attention, mlp = block.attention, block.mlp
        at = partial(observe, {place: zeros[...] for place, zeros in self.zeros.items()}, seen)
        # The scan made these modules for one layer of this program: no other program has them.
        block.norm1 = then(block.norm1, partial(at, "norm1"))
        attention.qkv = then(attention.qkv, partial(at, "attention.qkv"))
        core = then(attention.hooks.attention, partial(at, "attention.core"))
        attention.hooks = replace(attention.hooks, attention=core)
        attention.out = then(attention.out, partial(at, "attention.out"))
        block.norm2 = then(block.norm2, partial(at, "norm2"))
        if ROUTER in self.zeros:
            run_experts = mlp.hooks.experts
            mlp.hooks = replace(
                mlp.hooks,
                experts=lambda experts, x_BTC, weights_BTE: at(
                    "mlp.experts", run_experts(experts, x_BTC, at(ROUTER, weights_BTE))
                ),
            )
        else:
            mlp.up, mlp.down = then(mlp.up, partial(at, "mlp.up")), then(mlp.down, partial(at, "mlp.down"))
        x_BTC, routing = block(x_BTC, noise)
        return at("residual", x_BTC), (routing, seen)


def observe(zeros: dict[str, jax.Array], seen: dict[str, jax.Array], place: str, y: jax.Array) -> jax.Array:
    """y plus the zeros of its place. `seen` gets the sum."""
    seen[place] = y + jnp.astype(zeros[place], y.dtype)
    return seen[place]


def then(first: Callable[..., Any], second: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that calls `first`, and `second` with its result."""
    return lambda *arguments, **options: second(first(*arguments, **options))
