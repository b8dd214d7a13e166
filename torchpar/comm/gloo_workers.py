"""One worker a group: gloo carries out a group's collectives one at a time and in order, as NCCL does.

gloo gives a group two workers, and each notes the collective that it has just finished in a string of the
group, which nothing guards (`ProcessGroupGloo::runLoop`, torch 2.13). A name of more than 15 letters
lives on the heap: two workers that finish at the same moment free it twice, and the process aborts
("double free", "malloc(): unaligned tcache chunk"). DTensor's all-gathers are "ALLGATHER_COALESCED", and
several are under way at once.

A callback of a future that waits for another collective of its group, as PowerSGD's hook does, needs a second
worker, and would wait for ever here. None of the engines has such a callback.
"""

import datetime
import os
from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

from torchpar.launcher.interface import INTERFACE


@contextmanager
def one_worker() -> Generator[None]:
    """Make gloo's groups in it: each has one worker.

    >>> with one_worker():
    ...     dist.init_process_group("gloo")

    PyTorch passes no options on to gloo, so the class that it makes a group of is another one meanwhile.
    """
    with patch.object(distributed_c10d, "ProcessGroupGloo", _OneWorker):
        yield


class _OneWorker(ProcessGroupGloo):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        options = ProcessGroupGloo._Options()  # ty: ignore[missing-attribute]
        interfaces = os.environ.get(INTERFACE)
        options._devices = (
            [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
            if interfaces
            else [ProcessGroupGloo.create_default_device()]
        )
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)
