"""The learning rate at each step: linear warm-up, then a cosine to `min_lr`. nanoGPT's `get_lr`."""

import math

from compare.spec.experiment import Optimizer


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """The learning rate after `step` optimizer steps, in Python's doubles."""
    peak, low = optimizer.learning_rate, optimizer.min_lr
    if not optimizer.decay_lr:
        return peak
    if step < optimizer.warmup_iters:
        return peak * (step + 1) / (optimizer.warmup_iters + 1)  # never 0: the first step moves too
    if step >= optimizer.lr_decay_iters:
        return low
    progress = (step - optimizer.warmup_iters) / (optimizer.lr_decay_iters - optimizer.warmup_iters)
    return low + 0.5 * (1.0 + math.cos(math.pi * progress)) * (peak - low)
