"""Batch placement, autocast and a synchronised clock for one rank."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from compare.spec.axes import BATCH
from torchpar.state import RankBatch, Run

MIXED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def to_device(run: Run, arrays: Mapping[str, np.ndarray]) -> RankBatch:
    """This rank's rows of the global batch, on its device: (A, B, ...) -> (A, B / ranks of data, ...).

    Ranks along tp and pp have the same rows.

    Args:
        run: this rank's.
        arrays: the step's global arrays (`arrays_of_step`).
    """
    data, device = run.mesh.joined(*BATCH), run.mesh.device

    def own(array_AB: np.ndarray) -> torch.Tensor:
        share = array_AB.shape[1] // data.size
        rows = array_AB[:, data.rank * share : (data.rank + 1) * share]
        # PyTorch looks up int64, and has no arithmetic of unsigned words.
        is_key = rows.dtype == np.uint32
        here = torch.from_numpy(rows.view(np.int32) if is_key else rows.astype(np.int64))
        if device.type == "cuda":  # from pinned memory a copy does not wait for the kernels before it
            here = here.pin_memory()
        return here.to(device, non_blocking=True)

    return RankBatch(*(own(arrays[name]) for name in ("inputs", "targets", "keys") if name in arrays))


def autocast(run: Run) -> AbstractContextManager:
    """Mixed precision in 16 bits, as nanoGPT does it; else nothing.

    Without autocast's cache of cast weights: it would keep every weight that a sharded layout has freed.
    """
    dtype = MIXED.get(run.experiment.precision.dtype)
    if dtype is None:
        return nullcontext()
    return torch.autocast(run.mesh.device.type, dtype=dtype, cache_enabled=False)


def now(run: Run) -> float:
    """Time in seconds, after the device has finished its queue."""
    if run.mesh.device.type == "cuda":
        torch.cuda.synchronize(run.mesh.device)
    return time.perf_counter()
