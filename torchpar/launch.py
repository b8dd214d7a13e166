"""Ranks of this machine: their parent names the first that fails or is behind, and ends the rest.

Ranks leave their errors in files, and show their progress in shared memory.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch
from msgspec.structs import replace

from compare.contract.record import Failure, leave_failure
from compare.side.command import RunFailed, told_by
from compare.side.ending import ASKED, DivergedError, StoppedEarly, StopRequest
from compare.side.process_states import START, State, blame, first_cause, say
from compare.spec.experiment import ExperimentError, one_line
from compare.system.disk import no_room
from compare.system.facts import Activity, MissingDevicesError, cpu_seconds, is_stopped, look_s
from compare.system.signals import describe_exit, is_ignored
from torchpar.comm.process_groups import choose_interface, is_consequence

POLL_S = 0.1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ALIKE = ExperimentError | DivergedError | StoppedEarly  # all ranks raise it
PHASES = (
    *("starting", "setting up"),  # until all have met; then model, data, and what wraps them
    *("forward", "backward", "synchronisation", "optimizer", "record", "evaluation"),
)


@dataclass(frozen=True)
class Rank:
    """One process among `world_size`.

    Attributes:
        rank, world_size: among all processes.
        local_rank: among those of this machine.
        rendezvous: the file through which the ranks meet; None for torchrun's address and port.
        timeout_s: seconds without progress after which the run counts as hung.
        launcher_cpu_s: CPU seconds that the launcher spent for all ranks before it started them.
        progress: beats, step and phase, in memory that a parent may share. All ranks run the same sequence of
            phases, so `beats` says who is behind.
    """

    rank: int
    world_size: int
    local_rank: int
    rendezvous: Path | None = None
    timeout_s: float = 600.0
    launcher_cpu_s: float = 0.0
    progress: MutableSequence[int] = field(default_factory=lambda: [0, 0, 0])

    @property
    def in_step(self) -> bool:
        """True if it has come to its first step."""
        return self.progress[2] > 1

    @property
    def when(self) -> str:
        """For a sentence: what happened, and then."""
        return f"at step {self.progress[1]}" if self.in_step else "before the first step"

    @property
    def state(self) -> State:
        """Where it is, for whoever names the cause of a hang."""
        beats, step, phase = self.progress
        where = f"step {step}, {PHASES[phase]}" if self.in_step else START
        return State(number=self.rank, where=where, beats=beats)

    def at(self, step: int, phase: str) -> None:
        """Say that this rank enters a phase (one of PHASES) of a step."""
        self.progress[:] = [self.progress[0] + 1, step, PHASES.index(phase)]


def launch(
    main: Callable[[Rank], None], *, world_size: int, platform: str = "cpu", timeout_s: float = 600.0
) -> None:
    """Run `main(rank)` in `world_size` processes on this machine, and wait until all are done.

    Call it once, in the main thread: SIGINT and SIGTERM, unless ignored, end it, and are not heard after it.
    Forking takes 0.1 s, but a GPU or macOS does not survive it: there `main` must be picklable.

    Raises:
        MissingDevicesError: too few GPUs.
        RunFailed: a rank failed, was killed, or hangs: none made progress for `timeout_s` seconds; or SIGINT
            or SIGTERM came.
    """
    if platform == "gpu":
        require_gpus(world_size)
    spawns = platform == "gpu" or sys.platform == "darwin"
    context: SpawnContext | ForkContext = SpawnContext() if spawns else ForkContext()
    spent_s, ranks, processes = cpu_seconds(), list[Rank](), list[BaseProcess]()
    for number in SIGNALS:
        if not is_ignored(number):
            signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="torchpar-") as folder:
        try:
            for number in range(world_size):
                rank = Rank(
                    rank=number,
                    world_size=world_size,
                    local_rank=number,
                    rendezvous=Path(folder, "rendezvous"),
                    timeout_s=timeout_s,
                    launcher_cpu_s=spent_s,
                    progress=context.RawArray("q", 3),
                )
                ranks.append(rank)
                processes.append(context.Process(target=_be_rank, args=(main, rank, Path(folder))))
                processes[-1].start()
            supervise(processes, ranks, Path(folder), timeout_s)
        finally:
            for number in SIGNALS:  # Ctrl-C is not heard any more
                signal.signal(number, signal.SIG_IGN)
            left = multiprocessing.active_children()
            for process in left:
                process.kill()  # SIGTERM does not reach a stopped one
            for process in left:
                process.join()


def _be_rank(main: Callable[[Rank], None], rank: Rank, folder: Path) -> NoReturn:
    """A rank's whole life. Leaves by os._exit: destructors of a broken process group may block."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent, too, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    code = 0
    try:
        choose_interface("127.0.0.1")
        main(rank)
    except BaseException as error:
        code = 1
        failure = failure_of(error, rank)
        say(folder, replace(rank.state, failure=failure))
        leave_failure(folder, failure)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """No orphan, even after SIGKILL. On Linux the kernel ends a rank, also a stopped one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    assert parent

    def watch() -> None:  # also if it was gone before
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _interrupt(number: int, frame: object) -> NoReturn:
    """Of SIGINT and SIGTERM: the launch failed."""
    raise RunFailed(Failure(message=describe_exit(128 + number), exit_code=128 + number))


def failure_of(error: BaseException, rank: Rank) -> Failure:
    """An error that ended a rank, as the record states it."""
    if isinstance(error, ALIKE) and (told := told_by(error)):
        return told
    full = no_room(error)
    said = full or f"{type(error).__name__}: {one_line(error)}"
    return Failure(
        message=f"rank {rank.rank} failed {rank.when}: {said}",
        traceback="" if full else "".join(traceback.format_exception(error)),
        rank=rank.rank,
        is_consequence=is_consequence(error),
    )


def supervise(
    processes: Sequence[BaseProcess], ranks: Sequence[Rank], folder: Path, timeout_s: float
) -> None:
    """Return when all ranks are done; raise RunFailed when one failed or none makes progress.

    Before its first step a rank makes progress as long as it uses the processor: it is not known how long
    importing, drawing weights and wrapping take. A phase of a step has to end within `timeout_s`.
    """
    before: list[State] = []
    activities = [Activity(process.pid) for process in processes]
    last_progress = last_look = time.monotonic()

    def failed() -> dict[int, int]:
        return {rank: code for rank, process in enumerate(processes) if (code := process.exitcode)}

    while (running := [rank for rank in ranks if processes[rank.rank].exitcode is None]) and not failed():
        if StopRequest.came and ranks[0].in_step:
            StopRequest.came, first = False, processes[0].pid
            assert first
            os.kill(first, ASKED)  # all ranks agree on the step
        states = [rank.state for rank in ranks]
        if states != before:
            before, last_progress = states, time.monotonic()
        elif time.monotonic() - last_look > look_s(timeout_s):
            last_look = time.monotonic()
            starting = [rank.rank for rank in running if not rank.in_step]
            if any([activities[number].is_busy() for number in starting]):  # a list: each has to be asked
                last_progress = last_look
        if time.monotonic() - last_progress > timeout_s:
            waiting = {rank.rank: rank.state for rank in running}
            stopped = [number for number in waiting if is_stopped(processes[number].pid)]
            raise RunFailed(blame(waiting, stopped, timeout_s=timeout_s, state="stopped", noun="rank"))
        connection.wait([processes[rank.rank].sentinel for rank in running], timeout=POLL_S)
    if failed():
        raise RunFailed(first_cause(folder, failed, lambda n: f"rank {n}", lambda n: ranks[n].when))


def require_gpus(needed: int) -> None:
    """Raises MissingDevicesError if PyTorch sees fewer GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        raise MissingDevicesError(
            f"the layout needs {needed} GPUs and PyTorch sees {found}: use fewer devices, or platform cpu"
        )


def gpu_of(local_rank: int) -> int:
    """The GPU of a rank, of those that it sees: SLURM may give each task its own (`--gpus-per-task=1`)."""
    return 0 if "SLURM_PROCID" in os.environ and torch.cuda.device_count() == 1 else local_rank
