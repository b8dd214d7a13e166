"""Ranks for tests of your own modules: `run_ranks`, and the side of `@pytest.mark.ranks`."""

import datetime
import importlib
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from compare.system.workers import Handle, Workers, answer_calls, end_with_parent, raise_blamed
from torchpar.comm import gloo, process_groups
from torchpar.launch import require_gpus

T = TypeVar("T")
BACKENDS = {"cpu": gloo.CHECKED, "gpu": "nccl"}
"""Default backend by platform."""
PATIENCE = datetime.timedelta(days=1)
"""Time-out of a group: the parent's is shorter, and names the rank that hangs."""
LEAVE_S = 5.0
"""Seconds in which ranks leave their group."""
axis_of_world: str | None = None
"""Axis of PyTorch's default group in ledgers; None outside of tests, where a ledger looks for meshes."""


@dataclass(frozen=True)
class Place:
    """One rank among `world_size`."""

    rank: int
    world_size: int
    device: torch.device

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Begin a test whose mark has this mesh."""
        global axis_of_world
        axis_of_world = next((axis for axis, size in sizes.items() if size == self.world_size), "world")

    def mesh(self, sizes: Mapping[str, int], types: Sequence[str]) -> DeviceMesh:
        """A DeviceMesh over all ranks, with sizes by dimension."""
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def join(job: Mapping[str, Any]) -> Place:
    """Be rank `number` of `count`, which meet in the file `rendezvous`. Raises MissingDevicesError."""
    number, count, is_gpu = job["number"], job["count"], job["platform"] == "gpu"
    torch.set_num_threads(1)
    if is_gpu:
        require_gpus(count)
        torch.cuda.set_device(number)
    gloo.choose_interface("127.0.0.1")
    places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(place) for name, place in places.items()})
    backend = job["backend"] or BACKENDS[job["platform"]]
    if backend == "nccl_like":
        importlib.import_module("torchpar.comm.nccl_like")  # registers it
    # It repeats each error of a collective, and pytest shows it as the log of a test.
    logging.getLogger("c10d-NullHandler-default").disabled = True
    device = torch.device("cuda", number) if is_gpu else torch.device("cpu")
    dist.init_process_group(
        backend,
        store=dist.FileStore(job["rendezvous"], count),
        rank=number,
        world_size=count,
        timeout=PATIENCE,
        device_id=device if is_gpu else None,
    )
    return Place(rank=number, world_size=count, device=device)


def prepare(place: Place) -> None:
    """Nothing: the rank has joined its group."""


def check(place: Place) -> None:
    """Raises RuntimeError: a test has destroyed the group of all ranks."""
    if not dist.is_initialized():
        raise RuntimeError("the group of all ranks is gone: a test may not call destroy_process_group()")


def leave(place: Place) -> None:
    """Leave the group, after the last test has passed."""
    if dist.is_initialized() and place.device.type == "cuda":
        process_groups.leave_group()


is_lost = gloo.is_consequence
_MISMATCH = re.compile(r"Rank (\d+) is running collective:.*?OpType=(\w+)(?:, TensorShape=(\[[^]]*\]))?")


def explain(error: BaseException) -> str:
    """A sentence for an error of PyTorch that compares the calls of ranks; "" for other errors."""
    calls = [
        f"rank {rank} {call} of {shape or 'nothing'}" for rank, call, shape in _MISMATCH.findall(str(error))
    ]
    return f"the ranks call different collectives: {', '.join(calls)}" if len(calls) > 1 else ""


def run_ranks(
    function: Callable[..., T],
    count: int,
    *arguments: Any,
    platform: str = "cpu",
    backend: str = "",
    timeout_s: float = 600.0,
    start: str = "",
) -> list[T]:
    """Call `function(*arguments)` on `count` ranks of this machine. Returns the results, in order of rank.

    The ranks have joined a default group of gloo, or of NCCL with platform "gpu". Each is a fork of this
    process. With start "spawn", and always on GPUs and macOS, each is a new interpreter: then a script
    needs `if __name__ == "__main__":`, and the function must be at the top of a module.

    Raises:
        ValueError: a count below 1, or a function that cannot be sent to a new interpreter.
        WorkerError: a rank died, hangs for `timeout_s`, or its error cannot be sent.
        Exception: the error of the first rank that failed.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"run_ranks(function, {count!r}): give the number of ranks, 1 or more")
    context = _context(start, platform)
    if isinstance(context, SpawnContext):
        _require_picklable(function, arguments)
    with tempfile.TemporaryDirectory(prefix="torchpar-") as folder:

        def begin(number: int) -> tuple[Handle, Connection]:
            job = {"number": number, "count": count, "platform": platform, "backend": backend}
            job["rendezvous"] = str(Path(folder, "rendezvous"))
            ours, theirs = Pipe()
            with theirs:
                process = context.Process(
                    target=_be_rank, args=(theirs, job, function, arguments, os.getpid())
                )
                process.start()
            return _Process(process), ours

        workers = Workers(count, begin)
        grace_s = 0.0
        try:
            answers = workers.call(pickle.dumps(None), timeout_s=timeout_s)
            raise_blamed(workers, answers, timeout_s=timeout_s)
            grace_s = LEAVE_S
        finally:
            workers.end(grace_s=grace_s)
    return [answer.value for answer in answers]


def _context(start: str, platform: str) -> ForkContext | SpawnContext:
    if start not in ("", "fork", "spawn"):
        raise ValueError(f"start = {start!r}: choose fork or spawn")
    must_spawn = platform == "gpu" or sys.platform != "linux"
    if start == "spawn" or (must_spawn and not start):
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("fork")


def _require_picklable(function: Callable, arguments: tuple) -> None:
    """Raises ValueError: a function or an argument cannot be sent to a new interpreter."""
    try:
        pickle.dumps((function, arguments))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"run_ranks cannot send {name} to a new interpreter ({error}): "
            "define it with def at the top of a module"
        ) from None


class _Process:
    """A process of multiprocessing as a `Handle`."""

    def __init__(self, process: Any):
        self._process, self.pid = process, process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode


def _be_rank(
    pipe: Connection, job: dict[str, Any], function: Callable, arguments: tuple, parent: int
) -> None:
    """The life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too
    end_with_parent(parent)
    place: Place | None = None

    def do(message: bytes) -> Any:
        nonlocal place
        place = join(job)
        return function(*arguments)

    is_done = answer_calls(pipe, do, is_lost)
    if place and is_done:
        leave(place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # destructors of a broken process group may block
