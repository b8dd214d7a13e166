"""Faults to plant, so that the ladder can be seen to catch them. Nothing here runs otherwise."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from compare.contract.experiment import ExperimentError, Layout
from torchpar import library, manual, train, weights

MOVED_BY = 1e-3


def dropped_all_reduce(engine: str) -> AbstractContextManager:
    """Every replica keeps its own gradients."""
    if engine == "torch-library":
        return _ddp_with_hook(_keep_local)
    replicas = manual.DataParallel
    return mock.patch.multiple(
        replicas,
        _gradient_ready=lambda self, bucket, place: None,
        finish_gradient_synchronization=lambda self: None,
    )


def sum_for_mean(engine: str) -> AbstractContextManager:
    """Gradients are summed over the replicas and not divided."""
    if engine == "torch-library":
        return _ddp_with_hook(_sum)
    return mock.patch.object(manual.data_parallel.Bucket, "divide", staticmethod(lambda total, ranks: None))


def moved_weight(engine: str) -> AbstractContextManager:
    """One initial weight moves by 1e-3."""

    def load_moved(model, initial: Mapping[str, np.ndarray]) -> None:
        moved = {name: array.copy() for name, array in initial.items()}
        moved["blocks.0.mlp.up.weight"][0, 0] += MOVED_BY
        weights.load_weights(model, moved)

    return mock.patch.object(train, "load_weights", load_moved)


FAULTS: dict[str, Callable[[str], AbstractContextManager]] = {
    "dropped_all_reduce": dropped_all_reduce,
    "sum_for_mean": sum_for_mean,
    "moved_weight": moved_weight,
}
_NEED_REPLICAS = ("dropped_all_reduce", "sum_for_mean")


def plant(fault: str, engine: str) -> AbstractContextManager:
    """The context in which the run is faulty; "" plants nothing."""
    return FAULTS[fault](engine) if fault else nullcontext()


def check_fault(fault: str, layout: Layout) -> None:
    """Raises ExperimentError if there is no such fault, or if it cannot show under this layout."""
    if fault and fault not in FAULTS:
        raise ExperimentError(f"fault = {fault}: torchpar knows {', '.join(FAULTS)}")
    if fault in _NEED_REPLICAS and layout.dp_replicate == 1:
        raise ExperimentError(f"fault = {fault} needs replicas: set layout.dp_replicate to 2 or more")


def _ddp_with_hook(hook: Callable) -> AbstractContextManager:
    class Faulty(library.DataParallel):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(self.process_group, hook)

    return mock.patch.object(library, "DataParallel", Faulty)


def _keep_local(group: dist.ProcessGroup, bucket: dist.GradBucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _sum(group: dist.ProcessGroup, bucket: dist.GradBucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
