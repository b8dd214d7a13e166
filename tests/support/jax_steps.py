"""Two steps of a layout on JAX's virtual devices, compiled once a process, and what tests ask of them."""

from functools import cache
from typing import NamedTuple

import jax
import numpy as np

from compare.contract.communication import Communication, summed
from compare.numerics.context import order_of_positions
from compare.numerics.data import open_corpus
from compare.numerics.parameters import parameter_count
from compare.numerics.stream import arrays_of_step
from compare.side.recording import Progress
from compare.spec.experiment import Data, Experiment, Layout, Model, Optimizer, Precision, Train
from jaxpar.checkpoint import gather_tensors
from jaxpar.comm.mesh import make_mesh
from jaxpar.engine import Engine
from jaxpar.measure.ledger import read_ledger
from jaxpar.measure.memory import bytes_at_rest
from jaxpar.programs import TrainState, compile_program, device_scalars, trace_ladder
from jaxpar.train import initial_state, make_engine

ACCUMULATION, B, L, C, T, V = 2, 8, 4, 16, 10, 257
MODEL = Model(n_layer=L, n_head=2, n_embd=C, block_size=T, vocab_size=V, bias=True)
"""Tensor parallelism does not divide the vocabulary, and dp_shard neither vocabulary nor positions."""
N = parameter_count(MODEL)
REST = C * (V + T + 2)
"""Numbers in what is in no block: tokens, positions, the last norm."""


class Outcome(NamedTuple):
    """Numbers, memory and communication of two steps."""

    numbers: dict[str, np.ndarray]
    """Loss, norm, gradients and weights: "0 loss", "1 gradient norm.scale"."""
    resident: dict[str, list[int]]
    """Bytes at rest per device, as in the manifest."""
    hlo: str
    ledger: list[Communication]
    engine: Engine
    state: TrainState


def engine_and_state(name: str, experiment: Experiment) -> tuple[Engine, TrainState]:
    """An engine on virtual devices, and its state before the first step."""
    engine = make_engine(name, experiment, make_mesh(experiment.layout, platform="cpu"))
    return engine, initial_state(engine)


def experiment_of(layout: Layout, *, model: Model = MODEL, batch_size: int = B) -> Experiment:
    return Experiment(
        model=model,
        data=Data(source="synthetic"),
        optimizer=Optimizer(warmup_iters=0, grad_clip=0.1),
        train=Train(batch_size=batch_size, gradient_accumulation_steps=ACCUMULATION),
        precision=Precision(dtype="float64"),
        layout=layout,
    )


@cache
def two_steps(name: str, layout: Layout, *, model: Model = MODEL) -> Outcome:
    """Train in float64, with clipping that bites and every step at the full rate."""
    spec = experiment_of(layout, model=model)
    engine, state = engine_and_state(name, spec)
    step = compile_program(engine, trace_ladder(engine, state))
    numbers = {}
    for index in range(2):
        order_T = order_of_positions(model.block_size, layout)
        arrays = arrays_of_step(open_corpus(spec), spec, index)
        batch = {name: x if name == "keys" else x[..., order_T] for name, x in arrays.items()}
        batch = jax.device_put(batch, engine.shardings.batch)
        state.params, state.opt_state, metrics, gradients = step(
            state.params, state.opt_state, batch, device_scalars(spec, Progress(step=index, updates=index))
        )
        numbers |= {f"{index} {metric}": np.asarray(value) for metric, value in metrics.items()}
        for kind, tree in {"gradient": gradients, "weight": state.params}.items():
            named = gather_tensors(tree, engine)
            numbers |= {f"{index} {kind} {path}": tensor for path, tensor in named.items()}
    resident = bytes_at_rest(engine, state)
    hlo = step.as_text()
    assert hlo
    ledger = read_ledger(hlo, layout.axes)
    assert not ledger.problems
    return Outcome(numbers, resident, hlo, summed(ledger.rows), engine, state)


def worst_errors(outcome: Outcome, model: Model = MODEL) -> dict[str, float]:
    """Largest relative error of each kind of number against one device: "0 loss", "1 gradient" and so on."""
    errors: dict[str, float] = {}
    for name, x in two_steps("jax-compiler", Layout(), model=model).numbers.items():
        kind = " ".join(name.split()[:2])
        error = float(np.abs(outcome.numbers[name] - x).max() / np.abs(x).max())
        errors[kind] = max(errors.get(kind, 0.0), error)
    return errors


def size_of(ledger: list[Communication], **fields: str) -> int:
    """Logical bytes of the entries that have these values."""
    return sum(e.bytes for e in ledger if all(getattr(e, name) == value for name, value in fields.items()))
