"""Faults to plant on purpose, so that the ladder is seen to catch them.

`FAULTS` maps a name to a context manager factory by engine; the fault holds for what is built and run inside.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from compare.contract.axes import BATCH, DP_SHARD, TP
from compare.contract.experiment import ExperimentError, Layout
from torchpar import library, optimizer, train, weights
from torchpar.comm.collectives import Axis
from torchpar.faults import pipeline_faults
from torchpar.faults.library_faults import take_parts_for_sums, unsummed
from torchpar.library import data_parallel as library_data_parallel
from torchpar.library import tensor_parallel as library_tensor_parallel
from torchpar.manual import data_parallel, tensor_parallel
from torchpar.manual.buckets import Buckets
from torchpar.manual.megatron.mappings import scatter_to_region
from torchpar.manual.tensor_parallel import RowParallelLinear
from torchpar.manual.zero.flat_gradients import FlatGradients
from torchpar.parallel_model import local
from torchpar.state import Run

NEED_REPLICAS = ("dropped_all_reduce", "sum_for_mean")
NEED_TP = ("dropped_tp_all_reduce", "doubled_row_bias", "missing_norm_psum")
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
    if fault in NEED_TP and layout.tp == 1:
        raise ExperimentError(f"fault = {fault}: no layer is split with layout.tp = 1: give 2 or more")
    if fault == "missing_norm_psum" and not layout.sequence_parallel:
        raise ExperimentError(f"fault = {fault}: needs layout.sequence_parallel = true")
    if fault == "norm_counts_replicas_twice" and layout.dp_replicate == layout.tp == 1:
        raise ExperimentError(
            f"fault = {fault}: nothing is replicated with layout.dp_replicate = layout.tp = 1: raise one"
        )
    least = 2 if engine == "torch-library" else 1  # ZeroRedundancyOptimizer updates whole parameters
    if fault == "wrong_optimizer_shard" and layout.zero < least:
        raise ExperimentError(
            f"fault = {fault}: {engine} has no cuts with layout.zero = {layout.zero}: give {least} or more"
        )
    if fault == "stale_tied_copy" and layout.pp == 1:
        raise ExperimentError(f"fault = {fault}: the tied weight has one copy with layout.pp = 1: raise it")
    if fault == "overwritten_microbatch" and engine == "torch-library" and layout.zero > 1:
        raise ExperimentError(
            f"fault = {fault}: PyTorch adds the gradients in this layout, not we: leave it out"
        )
    return FAULTS[fault](engine)


def _dropped_all_reduce(engine: str) -> AbstractContextManager:
    """Gradients stay each replica's own."""
    if engine == "torch-library":
        return _ddp_with_hook(_keep_local)
    return patch.multiple(
        data_parallel,
        all_reduce_full_buckets=lambda buckets, axis: None,
        synchronize_gradients=lambda buckets, axis: buckets.reset(),
    )


def _sum_for_mean(engine: str) -> AbstractContextManager:
    if engine == "torch-library":
        return _ddp_with_hook(_sum)
    mean = data_parallel.synchronize_gradients

    def sum_over(buckets: Buckets, axis: Axis) -> None:
        mean(buckets, axis)
        torch._foreach_mul_([p.grad for p in buckets.parameters if p.grad is not None], axis.size)

    return patch.object(data_parallel, "synchronize_gradients", sum_over)


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

    class Faulty(library_data_parallel.DistributedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(Axis.of(self.process_group), hook)

    return patch.object(library_data_parallel, "DistributedDataParallel", Faulty)


def _keep_local(axis: Axis, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _sum(axis: Axis, bucket):
    work = axis.start_all_reduce(bucket.buffer())
    return work.get_future().then(lambda future: future.value()[0])


def _kept_gradients(engine: str) -> AbstractContextManager:
    """A step's gradients are added to those of the step before."""
    return patch.object(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)


def _dropped_tp_all_reduce(engine: str) -> AbstractContextManager:
    """Each rank goes on with its own part of what attention and MLP add to the stream."""
    if engine == "torch-library":
        return patch.object(library_tensor_parallel, "RowwiseParallel", unsummed)
    return patch.multiple(
        tensor_parallel, reduce_from_region=lambda x, axis: x, reduce_scatter_from_region=scatter_to_region
    )


def _doubled_row_bias(engine: str) -> AbstractContextManager:
    """Every rank adds the bias before the sum over ranks. DTensor would not let one."""
    if engine == "torch-library":
        raise ExperimentError("fault = doubled_row_bias: torch-library adds the bias, not we: leave it out")

    def forward(self: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
        partial = torch.nn.functional.linear(x, self.weight, self.bias)
        if self.sequence_dim is None:
            return tensor_parallel.reduce_from_region(partial, self.axis)
        return tensor_parallel.reduce_scatter_from_region(partial, self.axis, dim=self.sequence_dim)

    return patch.object(RowParallelLinear, "forward", forward)


def _missing_norm_psum(engine: str) -> AbstractContextManager:
    """Gradients of LayerNorms stay those of each rank's part of the sequence."""
    if engine == "torch-library":
        return patch.object(library, "complete_gradients", take_parts_for_sums)
    return patch.object(tensor_parallel, "synchronize_replicated_gradients", lambda *_: None)


def _norm_counts_replicas_twice(engine: str) -> AbstractContextManager:
    """Squares are summed over every axis, whether a parameter is spread over it or repeated."""
    set_up = train.set_up

    def wrong(*args: Any, **options: Any) -> Run:
        run = set_up(*args, **options)
        axes = [getattr(run.mesh, name) for name in (*BATCH, TP)]
        everywhere = tuple(axis for axis in axes if axis.size > 1)
        run.parallel = replace(run.parallel, sharded_over=lambda name: everywhere)
        return run

    return patch.object(train, "set_up", wrong)


def _wrong_optimizer_shard(engine: str) -> AbstractContextManager:
    """Each rank updates its shard with the gradients of the next rank's."""
    norm_of = optimizer.gradient_norm

    def wrong(parameters: Mapping[str, nn.Parameter], sharded_over: Callable, **options: Any) -> torch.Tensor:
        norm = norm_of(parameters, sharded_over, **options)
        axis = next(a for name in parameters for a in sharded_over(name) if a.name == DP_SHARD)
        mine = [local(p.grad).view(-1) for p in parameters.values() if p.grad is not None]
        shards = axis.all_gather_objects(torch.cat(mine))
        theirs, start = shards[(axis.rank + 1) % axis.size], 0
        for gradient in mine:  # cut elsewhere than theirs: round and round, where there are too few
            places = torch.arange(start, start + len(gradient)) % max(len(theirs), 1)
            gradient.copy_(theirs[places] if len(theirs) else torch.zeros_like(gradient))
            start += len(gradient)
        return norm

    return patch.object(optimizer, "gradient_norm", wrong)


@contextmanager
def _overwritten_microbatch(engine: str) -> Generator[None]:
    """The gradient of a step is that of its last pass."""

    def overwrite(run: Run, share: torch.Tensor) -> None:
        for parameter in run.parallel.module.parameters():
            parameter.grad = None
        share.backward()

    keep_last = staticmethod(lambda slot, gradient, is_first: slot.copy_(gradient))
    in_stages = pipeline_faults.overwritten_microbatch(engine)
    with (
        patch.object(train, "backward", overwrite),
        patch.object(FlatGradients, "accumulate", keep_last),
        in_stages,
    ):
        yield


FAULTS: dict[str, Callable[[str], AbstractContextManager]] = {
    "dropped_all_reduce": _dropped_all_reduce,
    "dropped_tp_all_reduce": _dropped_tp_all_reduce,
    "doubled_row_bias": _doubled_row_bias,
    "missing_norm_psum": _missing_norm_psum,
    "sum_for_mean": _sum_for_mean,
    "kept_gradients": _kept_gradients,
    "moved_weight": _moved_weight,
    "norm_counts_replicas_twice": _norm_counts_replicas_twice,
    "wrong_optimizer_shard": _wrong_optimizer_shard,
    "overwritten_microbatch": _overwritten_microbatch,
    "stale_tied_copy": pipeline_faults.stale_tied_copy,
}
