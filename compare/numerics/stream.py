"""Inputs of a training step, and evaluation on a corpus.

An evaluation is the mean loss over fresh batches of both splits, without an update: nanoGPT's way.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from compare.numerics.data import SPLITS, Corpus
from compare.numerics.dropout import sequence_keys
from compare.spec.experiment import Experiment

AHEAD = 8
"""Programs that a device is given before the first of them is waited for. XLA's CPU client takes 32: where
one device has them, and another waits for it in a collective, neither goes on, and the process aborts after
40 s (jaxlib 0.10.2)."""


def arrays_of_step(corpus: Corpus, experiment: Experiment, step: int) -> dict[str, np.ndarray]:
    """Arrays of one step: inputs, targets int32 (A, B, T); with dropout keys uint32 (A, B, 2)."""
    inputs, targets = corpus.batch(experiment, step)
    return {"inputs": inputs, "targets": targets, **keys_of_step(experiment, step)}


def keys_of_step(experiment: Experiment, step: int) -> dict[str, np.ndarray]:
    """Keys of a step's sequences: {"keys": uint32 (A, B, 2)}; {} without dropout."""
    if not experiment.model.dropout:
        return {}
    train = experiment.train
    shape_AB = (train.gradient_accumulation_steps, train.batch_size)
    return {"keys": sequence_keys(train.seed, step, *shape_AB)}


def shapes_of_step(experiment: Experiment) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shapes and dtypes of what `arrays_of_step` gives."""
    train, model = experiment.train, experiment.model
    shape_AB = (train.gradient_accumulation_steps, train.batch_size)
    tokens = ((*shape_AB, model.block_size), np.dtype("int32"))
    keys = {"keys": ((*shape_AB, 2), np.dtype("uint32"))} if model.dropout else {}
    return {"inputs": tokens, "targets": tokens, **keys}


def shape_of_routing(experiment: Experiment) -> tuple[int, ...]:
    """(L, A, B, T, k): a number for each expert that a token of a step is given to, in each block."""
    train, model = experiment.train, experiment.model
    shape_AB = (train.gradient_accumulation_steps, train.batch_size)
    return model.n_layer, *shape_AB, model.block_size, model.experts_per_token


class Evaluation(Struct, frozen=True, kw_only=True):
    """One evaluation. Losses are mean cross-entropies in nats."""

    step: int
    """How many steps were done."""
    train: float
    """Over batches of the training split, other ones than it is trained on."""
    validation: float


def is_due(experiment: Experiment, step: int) -> bool:
    """Whether an evaluation is due after this many steps of the whole training."""
    train = experiment.train
    return bool(train.eval_interval) and (step % train.eval_interval == 0 or step == train.max_iters)


def steps_due(experiment: Experiment, first_step: int = 0) -> list[int]:
    """After which steps a run is to evaluate."""
    return [step for step in range(first_step, experiment.train.max_iters + 1) if is_due(experiment, step)]


def evaluate(experiment: Experiment, corpus: Corpus, step: int, loss_of: Callable[..., Any]) -> Evaluation:
    """Evaluate the weights as they are, after `step` steps, on a corpus that has both splits.

    `loss_of` makes of inputs and targets, int32 (A, B, T), their mean loss: a scalar, which is waited for
    when `AHEAD` more have been asked for.
    """
    passes = math.ceil(experiment.train.eval_iters / experiment.train.gradient_accumulation_steps)
    means = {}
    for split in SPLITS:
        losses = []
        for index in range(passes):
            losses.append(loss_of(*corpus.evaluation_batch(experiment, split, step, index)))
            if index >= AHEAD:
                losses[index - AHEAD] = float(losses[index - AHEAD])
        means[split] = sum(map(float, losses)) / passes
    return Evaluation(step=step, train=means["train"], validation=means["validation"])
