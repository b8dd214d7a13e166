"""An oracle of the first evaluation, in plain PyTorch: no engine's loop, and no batch of `evaluate`."""

import numpy as np
import torch

from compare.numerics.data import open_corpus
from compare.numerics.parameters import initial_parameters
from compare.spec.experiment import Experiment, edited
from torchpar.model import GPT
from torchpar.weights import load_weights


def untrained_losses(spec: Experiment) -> list[float]:
    """Mean losses of the initial weights over windows of both splits, drawn here word by word."""
    model = GPT(edited(spec, {"model": {"dropout": 0.0}}).model).double()
    load_weights(model, initial_parameters(spec))
    corpus, length, found = open_corpus(spec), spec.model.block_size, []
    passes = spec.train.gradient_accumulation_steps  # of a batch, which are evaluated together
    for number, tokens in enumerate((corpus.train, corpus.validation)):
        losses = []
        for index in range(spec.train.eval_iters // passes):
            random = np.random.Philox(key=spec.train.seed, counter=[0, index, 0, 3 + number])
            words = random.random_raw(passes * spec.train.batch_size)
            starts = [int((word >> 11) / 2**53 * (len(tokens) - length)) for word in map(int, words)]
            windows = torch.tensor(np.stack([tokens[at : at + length + 1] for at in starts]).astype(np.int64))
            with torch.no_grad():
                losses.append(float(model(windows[:, :-1], windows[:, 1:])[1]))
        found.append(sum(losses) / len(losses))
    return found
