"""Evaluation: the mean loss over fresh batches of both splits, without an update: nanoGPT's way."""

import math
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from compare.numerics.data import SPLITS, Corpus
from compare.numerics.stream import OwnBatches
from compare.spec.experiment import Experiment, ExperimentError


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


def require_validation(experiment: Experiment, corpus: Corpus | OwnBatches) -> None:
    """Refuse to evaluate where there is nothing to evaluate on. Raises ExperimentError."""
    interval, length = experiment.train.eval_interval, experiment.model.block_size
    if not interval:
        return
    if isinstance(corpus, OwnBatches):
        why = "batches given from Python have no validation split: set it to 0"
    elif len(corpus.validation) <= length:
        why = (
            f"data.source = {experiment.data.source} has {len(corpus.validation)} tokens to validate on, too "
            f"few for model.block_size = {length}: give a val.bin beside train.bin, or more text"
        )
    else:
        return
    raise ExperimentError(f"train.eval_interval = {interval}: {why}")


def evaluate(
    experiment: Experiment, corpus: Corpus | OwnBatches, step: int, loss_of: Callable[..., Any]
) -> Evaluation:
    """Evaluate the weights as they are, after `step` steps, on a corpus that has both splits.

    `loss_of` makes of inputs and targets, int32 (A, B, T), their mean loss: a scalar, which is not waited for
    before the last one is asked for.
    """
    assert isinstance(corpus, Corpus)
    passes = math.ceil(experiment.train.eval_iters / experiment.train.gradient_accumulation_steps)
    means = {}
    for split in SPLITS:
        losses = [
            loss_of(*corpus.evaluation_batch(experiment, split, step, index)) for index in range(passes)
        ]
        means[split] = sum(float(loss) for loss in losses) / passes
    return Evaluation(step=step, train=means["train"], validation=means["validation"])
