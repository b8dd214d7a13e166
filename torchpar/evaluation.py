"""Evaluation of the weights on both splits."""

import functools

import numpy as np
import torch

from compare.contract.communication import LOSS
from compare.numerics.evaluation import Evaluation, evaluate
from compare.spec.axes import BATCH
from torchpar.on_device import autocast, to_device
from torchpar.state import Run


def evaluate_weights(run: Run, step: int) -> Evaluation:
    """Evaluate the weights after so many steps; all ranks together."""
    with run.mesh.traffic.paused():
        evaluation = evaluate(run.experiment, run.corpus, step, functools.partial(mean_loss, run))
    if run.parallel.end_evaluation:
        run.parallel.end_evaluation()
    return evaluation


@torch.no_grad()
def mean_loss(run: Run, inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> torch.Tensor:
    """The mean loss of a global batch, a scalar, without gradients."""
    run.rank.at(run.state.step, "evaluation")
    data, batch = run.mesh.joined(*BATCH), to_device(run, {"inputs": inputs_ABT, "targets": targets_ABT})
    if run.parallel.evaluate_pipeline:
        loss = run.parallel.evaluate_pipeline(batch, functools.partial(autocast, run))
    else:
        with autocast(run):
            losses = [run.parallel.module(*one)[1] for one in batch.passes()]
        loss = torch.stack(losses).mean()
    if data.size > 1:
        data.all_reduce(loss, purpose=LOSS)
        loss /= data.size
    return loss
