"""State files of the processes of a run: where each process is, and why it ended.

Each process writes `process-K.json` into a folder that all processes reach. A process that waits in a
collective for a lost process gets no message; these files name the lost process.
"""

import contextlib
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from compare.contract.record import STATE, Failure, read_failure
from compare.side.processes import Process
from compare.spec.experiment import ExperimentError
from compare.system.facts import has_ended
from compare.system.json_files import read_json, write_json
from compare.system.signals import describe_exit

START = "the start"
OUTSIDE_STEPS = (START, "setting up", "the end")
PHASES = (
    *OUTSIDE_STEPS,
    *("compute", "forward", "backward", "synchronisation", "optimizer", "record", "evaluation"),
)
POLL_S = 0.05
CAUSE_GRACE_S = 2.0


class Heartbeat:
    """Position of a process in its run: the number of changes so far, the step and the phase.

    All processes run the same sequence of phases, so the process with the fewest beats is behind. `cells`,
    three integers, may be memory that a parent shares.
    """

    def __init__(self, cells: MutableSequence[int] | None = None):
        self._cells = [0, 0, 0] if cells is None else cells

    def at(self, step: int, phase: str) -> None:
        """Enter a phase of a step, one of PHASES."""
        self._cells[:] = [self._cells[0] + 1, step, PHASES.index(phase)]

    @property
    def beats(self) -> int:
        """The number of phases entered so far."""
        return self._cells[0]

    @property
    def in_step(self) -> bool:
        """True during a step, which must end within the time-out."""
        return self._cells[2] >= len(OUTSIDE_STEPS)

    @property
    def where(self) -> str:
        """The step and the phase, such as `step 3, forward`."""
        _, step, phase = self._cells
        return f"step {step}, {PHASES[phase]}" if self.in_step else PHASES[phase]

    @property
    def when(self) -> str:
        """The step as an adverbial phrase, such as `at step 3`."""
        if self.in_step:
            return f"at step {self._cells[1]}"
        return "after the last step" if self.where == OUTSIDE_STEPS[-1] else "before the first step"


class State(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last state that a process wrote."""

    number: int
    host: str = ""
    pid: int = 0
    """0 if the process had not started when another process wrote this state."""
    where: str = START
    """The step and phase, such as `step 5, forward`."""
    beats: int = 0
    """`Heartbeat.beats`: the process with the fewest is behind."""
    looks: int = 0
    """How many times its supervisor found it computing outside of a step."""
    waits: bool = False
    """True if nothing changed for the time-out."""
    begun: dict[str, int] = {}
    """By group, the number of the last collective that began on the device of a process that waits. On a GPU
    the phase is the host's, which runs ahead of the device."""
    failure: Failure | None = None
    """Why the process ended."""


def announce(folder: Path, process: Process) -> None:
    """Write the first state of this process. Process 0 removes the states of an earlier run.

    Raises ExperimentError: the process cannot write into the folder.
    """
    if process.is_first:
        ended = [number for number, state in read_states(folder).items() if state.waits or state.failure]
        for number in ended + dead_processes(folder):
            (folder / f"{STATE}{number}.json").unlink(missing_ok=True)
    try:
        _write(folder, State(number=process.number))
    except OSError as error:
        raise ExperimentError(
            f"{process.name} cannot write into {folder}: {error.strerror}: give --run_dir on a file system "
            "that all hosts share"
        ) from None


def write_state(folder: Path, state: State) -> None:
    """Write a state. Without a host, it is of this process. An error of the disk is ignored."""
    with contextlib.suppress(OSError):
        _write(folder, state)


def _write(folder: Path, state: State) -> None:
    located = state if state.host else replace(state, host=socket.gethostname(), pid=os.getpid())
    write_json(folder / f"{STATE}{state.number}.json", located)


def read_states(folder: Path) -> dict[int, State]:
    """The last state of each process, by number."""
    states = [read_json(path, State) for path in folder.glob(f"{STATE}*.json")]
    return {state.number: state for state in sorted(states, key=lambda state: state.number)}


def name_of_device(device: int, states: Mapping[int, State], *, devices: int) -> str:
    """A device in a message, with the process that has it and its host: `device 1 (process 1 on host1)`."""
    number = device * len(states) // devices
    process = f" (process {number} on {states[number].host})" if number in states else ""
    return f"device {device}{process}"


def dead_processes(folder: Path) -> list[int]:
    """Numbers of this host's processes that have ended."""
    here = [state for state in read_states(folder).values() if state.host == socket.gethostname()]
    return [state.number for state in here if state.pid and has_ended(state.pid)]


def read_failures(folder: Path) -> list[Failure]:
    """Failures of all processes that ended; the one in error.json comes first."""
    failures = [read_failure(folder), *(state.failure for state in read_states(folder).values())]
    return [failure for failure in failures if failure]


def read_cause(folder: Path) -> Failure | None:
    """The first failure that is not the consequence of another process's end; None if there is none."""
    return next((failure for failure in read_failures(folder) if not failure.is_consequence), None)


def find_first_cause(
    folder: Path,
    exit_codes: Callable[[], Mapping[int, int]],
    name: Callable[[int], str],
    when: Callable[[int], str] = lambda number: "",
) -> Failure:
    """The cause of the end of child processes, of which `exit_codes()` are the non-zero codes by number.

    The order is: an error that a process wrote, a kill, an error that only reports a lost process. A process
    may notice a loss before the parent does, so codes and files are read again for CAUSE_GRACE_S.
    """
    deadline = time.monotonic() + CAUSE_GRACE_S
    while True:
        codes, failures = exit_codes(), read_failures(folder)  # in this order: a process writes, then ends
        if causes := [failure for failure in failures if not failure.is_consequence]:
            return causes[0]
        silent = [number for number in codes if number not in [failure.rank for failure in failures]]
        # C++ may abort because a peer is lost, so an abort can be a consequence.
        killed = [number for number in silent if codes[number] != -signal.SIGABRT]
        if killed or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for number in killed or silent:
        how = f"{'was ' if codes[number] < 0 else ''}{describe_exit(codes[number], when=when(number))}"
        return Failure(message=f"{name(number)} {how}", rank=number)
    return failures[0]


def describe_hang(
    states: Mapping[int, State],
    stuck: Sequence[int],
    *,
    timeout_s: float,
    state: str = "gave no answer",
    noun: str = "process",
) -> Failure:
    """The Failure of a hang: it names the `stuck` processes and their state, or else the processes behind."""
    fewest = min((place.beats for place in states.values()), default=0)
    behind = stuck or [number for number, place in states.items() if place.beats == fewest]
    waiting = [number for number in states if number not in behind]
    hosts = {place.host for place in states.values()}
    by_host = defaultdict[str, list[int]](list)
    for number in behind:
        by_host[states[number].host if number in states and len(hosts) > 1 else ""].append(number)
    if not stuck:
        where = states[behind[0]].where
        if late := behind_on_devices(states):
            return _late_on_devices(late, states, timeout_s=timeout_s, noun=noun)
        if not waiting and len(behind) > 1:
            link = f", on {', '.join(by_host)}: is the link between them cut?" if any(by_host) else ""
            return Failure(message=f"no {noun} made progress for {timeout_s:g} s: all wait in {where}{link}")
        state = f"stayed in {where}"
    named = " and ".join(f"{numbered(noun, each)}{host and f' on {host}'}" for host, each in by_host.items())
    message = f"{named} {state}: no progress for {timeout_s:g} s"
    if waiting:
        places = ", ".join(dict.fromkeys(states[number].where for number in waiting))
        message += f", while {numbered(noun, waiting)} waited in {places}"
    return Failure(message=message, rank=behind[0])


def behind_on_devices(states: Mapping[int, State]) -> dict[int, str]:
    """The processes whose device has not begun a collective that others wait in, and a group of each.

    A process that itself waits for another one, in some group, is not to blame.
    """
    late, waits = dict[int, str](), set[int]()
    for group in dict.fromkeys(group for state in states.values() for group in state.begun):
        last = {n: state.begun[group] for n, state in states.items() if group in state.begun}
        most = max(last.values())
        late = {number: group for number, call in last.items() if call < most} | late
        if min(last.values()) < most:
            waits |= {number for number, call in last.items() if call == most}
    return {number: group for number, group in late.items() if number not in waits}


def _late_on_devices(
    late: Mapping[int, str], states: Mapping[int, State], *, timeout_s: float, noun: str
) -> Failure:
    """The Failure of a hang that `behind_on_devices` explains."""
    first, group = next(iter(late.items()))
    call = states[first].begun[group] + 1
    waiting = [n for n, state in states.items() if state.begun.get(group, 0) >= call]
    who, others = numbered(noun, sorted(late)), numbered(noun, waiting)
    return Failure(
        message=f"{who} did not begin collective {call} of group {group} on the device, in which {others} "
        f"waited: no progress for {timeout_s:g} s in {states[first].where}",
        rank=first,
    )


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """A noun with numbers: `rank 1`, `processes 2, 3`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{plural if len(numbers) > 1 else noun} {', '.join(map(str, numbers))}"
