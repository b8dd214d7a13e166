"""Sizes that the closed forms of communication are made of."""

from collections.abc import Iterable

from compare.judge.closed_forms.memory import on_one_of_tp
from compare.numerics.parameters import Parameter, storage_dtype
from compare.spec.experiment import Experiment


def microbatches_of(experiment: Experiment) -> int:
    """Forwards of a layer in a step: accumulated passes, or microbatches of all of them."""
    return experiment.train.gradient_accumulation_steps * experiment.layout.microbatches


def ticks_of(experiment: Experiment) -> int:
    """Ticks of XLA's forward pipeline; backward has as many. Idle stages compute as the others do."""
    layout = experiment.layout
    return microbatches_of(experiment) * layout.chunks + layout.pp - 1


def stream_bytes(experiment: Experiment) -> float:
    """Bytes of the activations (B, T, C) of one pass, of a device's rows."""
    model, rows = experiment.model, experiment.train.batch_size // experiment.layout.data_parallel
    return itemsize_of(experiment) * rows * model.block_size * model.n_embd


def bytes_of(parameters: Iterable[Parameter], experiment: Experiment) -> float:
    """Bytes of parameters on one device of tp, before dp_shard splits them."""
    return itemsize_of(experiment) * on_one_of_tp(parameters, experiment.layout)


def itemsize_of(experiment: Experiment) -> int:
    """Bytes of a stored number."""
    return storage_dtype(experiment).itemsize
