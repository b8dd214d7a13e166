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
"""Number of programs that are started before the first one is awaited. XLA's CPU client has room for 32. If
one device fills it while another waits for it in a collective, the process aborts after 40 s."""


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
    """Shapes and dtypes of `arrays_of_step`."""
    train, model = experiment.train, experiment.model
    shape_AB = (train.gradient_accumulation_steps, train.batch_size)
    tokens = ((*shape_AB, model.block_size), np.dtype("int32"))
    keys = {"keys": ((*shape_AB, 2), np.dtype("uint32"))} if model.dropout else {}
    return {"inputs": tokens, "targets": tokens, **keys}


def shape_of_routing(experiment: Experiment) -> tuple[int, ...]:
    """Shape (L, A, B, T, k) of the experts that each token of a step chooses in each block."""
    train, model = experiment.train, experiment.model
    shape_AB = (train.gradient_accumulation_steps, train.batch_size)
    return model.n_layer, *shape_AB, model.block_size, model.experts_per_token


class Evaluation(Struct, frozen=True, kw_only=True):
    """One evaluation. Losses are mean cross-entropies in nats."""

    step: int
    """Number of finished steps."""
    train: float
    """Loss over batches of the training split that training does not draw."""
    validation: float


def is_due(experiment: Experiment, step: int) -> bool:
    """Whether an evaluation is due after this many steps of the whole training."""
    train = experiment.train
    return bool(train.eval_interval) and (step % train.eval_interval == 0 or step == train.max_iters)


def steps_due(experiment: Experiment, first_step: int = 0) -> list[int]:
    """Numbers of finished steps at which a run evaluates."""
    return [step for step in range(first_step, experiment.train.max_iters + 1) if is_due(experiment, step)]


def evaluate(experiment: Experiment, corpus: Corpus, step: int, loss_of: Callable[..., Any]) -> Evaluation:
    """Evaluate the weights after `step` steps, on a corpus with both splits.

    `loss_of` starts to compute the mean loss, a scalar, of inputs and targets, int32 (A, B, T). At most
    `AHEAD` losses are computed at one time.
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
