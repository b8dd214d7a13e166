"""Faults to plant on purpose, so that the ladder is seen to catch them.

`FAULTS` maps a name to a context manager factory by engine; the fault holds for what is built and run inside.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from compare.contract.experiment import ExperimentError, Layout
from torchpar import library, train, weights
from torchpar.collectives import Axis
from torchpar.manual.data_parallel import Bucket, DataParallel

NEED_REPLICAS = ("dropped_all_reduce", "sum_for_mean")
MOVED, BY = "blocks.0.mlp.up.weight", 1e-3


def plant(fault: str, *, engine: str, layout: Layout) -> AbstractContextManager:
    """The fault as a context manager; "" plants none.

    Raises:
        ExperimentError: an unknown fault, or one that cannot show under this layout.
    """
    if not fault:
        return nullcontext()
    if fault not in FAULTS:
        raise ExperimentError(f"fault = {fault}: {engine} knows {', '.join(FAULTS)}")
    if fault in NEED_REPLICAS and layout.dp_replicate == 1:
        raise ExperimentError(
            f"fault = {fault}: nothing is reduced with layout.dp_replicate = 1: give 2 or more"
        )
    return FAULTS[fault](engine)


def _dropped_all_reduce(engine: str) -> AbstractContextManager:
    """Gradients stay each replica's own."""
    if engine == "torch-library":
        return _ddp_with_hook(_keep_local)
    return patch.multiple(
        DataParallel,
        _gradient_ready=lambda self, bucket, place: None,
        finish_gradient_synchronization=lambda self: None,
    )


def _sum_for_mean(engine: str) -> AbstractContextManager:
    if engine == "torch-library":
        return _ddp_with_hook(_sum)
    return patch.object(Bucket, "divide", staticmethod(lambda total, ranks: None))


def _moved_weight(engine: str) -> AbstractContextManager:
    def load_moved(model: Any, named: Mapping[str, np.ndarray]) -> None:
        weight = named[MOVED].copy()
        weight.flat[0] += BY
        weights.load_weights(model, {**named, MOVED: weight})

    return patch.object(train, "load_weights", load_moved)


def _ddp_with_hook(hook: Callable[[Axis, Any], torch.futures.Future]) -> AbstractContextManager:
    """DDP with another communication hook: the hook takes a bucket and promises its reduced buffer.

    The hooks are not annotated: DDP would insist on `torch.distributed`'s own class.
    """

    class Faulty(library.DataParallel):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(Axis.of(self.process_group), hook)

    return patch.object(library, "DataParallel", Faulty)


def _keep_local(axis: Axis, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _sum(axis: Axis, bucket):
    work = axis.start_all_reduce(bucket.buffer())
    return work.get_future().then(lambda future: future.value()[0])


FAULTS: dict[str, Callable[[str], AbstractContextManager]] = {
    "dropped_all_reduce": _dropped_all_reduce,
    "sum_for_mean": _sum_for_mean,
    "moved_weight": _moved_weight,
}
