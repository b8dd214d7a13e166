"""State files of a run's processes: where each one is, and why it ended.

Each process writes `process-K.json` into the folder of the run when it starts, so that the cause of an end is
found where collectives do not reach.
"""

import contextlib
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
POLL_S = 0.05
CAUSE_GRACE_S = 2.0
LOOKS = 6
SETTLED_S = 6.0
"""Processes begin to wait within a step of each other, and look once in a second: so much later one may see
the time-out than another. Less than the grace of a side's own watchdog, which ends the process."""


class State(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process says of itself, in its own file."""

    number: int
    host: str = ""
    pid: int = 0
    """0 if it was not yet started, when somebody else said this."""
    where: str = START
    """`step 5, forward`."""
    beats: int = 0
    """Of two that run the same sequence, the one with fewer is behind."""
    looks: int = 0
    """How often it was seen to compute outside of a step."""
    waits: bool = False
    """Nothing has moved in it for the time-out."""
    failure: Failure | None = None
    """Why it left."""


def announce(folder: Path, process: Process) -> None:
    """Leave the first state of this process; the first one removes what an earlier run left.

    Raises ExperimentError: its host may not write there.
    """
    if process.is_first:
        said = [number for number, state in states_in(folder).items() if state.waits or state.failure]
        for number in said + gone_from(folder):
            (folder / f"{STATE}{number}.json").unlink(missing_ok=True)
    try:
        _write(folder, State(number=process.number))
    except OSError as error:
        raise ExperimentError(
            f"{process.name} cannot write into {folder}: {error.strerror}: give --run_dir on a file system "
            "that all hosts share"
        ) from None


def say(folder: Path, state: State) -> None:
    """Leave a state, by default of this process, if there is room."""
    with contextlib.suppress(OSError):
        _write(folder, state)


def _write(folder: Path, state: State) -> None:
    own = state if state.host else replace(state, host=socket.gethostname(), pid=os.getpid())
    write_json(folder / f"{STATE}{own.number}.json", own)


def states_in(folder: Path) -> dict[int, State]:
    """What each process said last, by number."""
    states = [read_json(path, State) for path in folder.glob(f"{STATE}*.json")]
    return {state.number: state for state in sorted(states, key=lambda state: state.number)}


def gone_from(folder: Path) -> list[int]:
    """Processes of this host that have ended."""
    own = [state for state in states_in(folder).values() if state.host == socket.gethostname() and state.pid]
    return [state.number for state in own if has_ended(state.pid)]


def told_in(folder: Path) -> list[Failure]:
    """What processes that left say, the first one's first."""
    said = [read_failure(folder), *(state.failure for state in states_in(folder).values())]
    return [failure for failure in said if failure]


def told_cause(folder: Path) -> Failure | None:
    """The cause that some process left, if any did: one that only saw another go tells none."""
    return next((failure for failure in told_in(folder) if not failure.is_consequence), None)


def blame_for_hang(folder: Path, own: State, *, count: int, timeout_s: float) -> Failure | None:
    """The cause of a hang, as every running process finds it: who does not answer, or who is behind.

    None if another process still computes, outside of a step.
    """
    before = states_in(folder)
    say(folder, replace(own, waits=True))
    for _ in range(LOOKS):
        time.sleep(SETTLED_S / LOOKS)
        if cause := told_cause(folder):
            return cause
        states = states_in(folder)
        if any(state.looks > before[number].looks for number, state in states.items() if number in before):
            say(folder, own)  # another computes
            return None
        silent = [number for number in range(count) if number not in states or not states[number].waits]
        if not silent:
            break
    return blame(states, silent, timeout_s=timeout_s)


def blame(
    states: Mapping[int, State],
    stuck: Sequence[int],
    *,
    timeout_s: float,
    state: str = "gave no answer",
    noun: str = "process",
) -> Failure:
    """Failure of a hang: it names those that are stuck, in this state, or else those behind all others."""
    fewest = min((place.beats for place in states.values()), default=0)
    behind = stuck or [number for number, place in states.items() if place.beats == fewest]
    others = [number for number in states if number not in behind]
    by_host = defaultdict[str, list[int]](list)
    for number in behind:
        by_host[states[number].host if number in states else ""].append(number)
    if not stuck:
        where = states[behind[0]].where
        if not others and len(behind) > 1:
            link = f", on {', '.join(by_host)}: is the link between them cut?" if any(by_host) else ""
            return Failure(message=f"no {noun} made progress for {timeout_s:g} s: all wait in {where}{link}")
        state = f"stayed in {where}"
    named = " and ".join(f"{numbered(noun, each)}{name and f' on {name}'}" for name, each in by_host.items())
    message = f"{named} {state}: no progress for {timeout_s:g} s"
    if others:
        there = ", ".join(dict.fromkeys(states[number].where for number in others))
        message += f", while {numbered(noun, others)} waited in {there}"
    return Failure(message=message, rank=behind[0])


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """For a sentence: `rank 1`, `processes 2, 3`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{plural if len(numbers) > 1 else noun} {', '.join(map(str, numbers))}"


def first_cause(
    folder: Path,
    ended: Callable[[], Mapping[int, int]],
    name: Callable[[int], str],
    when: Callable[[int], str] = lambda number: "",
) -> Failure:
    """The cause of an end: a process's own error, else a death, else an error that tells of a lost process.

    `ended` gives the exit codes of processes that have failed: some may notice a lost one before we do, so it
    and what they left in the folder are asked again for a while.
    """
    deadline = time.monotonic() + CAUSE_GRACE_S
    while True:
        codes, said = ended(), told_in(folder)  # in this order: who fails speaks first
        if causes := [failure for failure in said if not failure.is_consequence]:
            return causes[0]
        silent = [number for number in codes if number not in [failure.rank for failure in said]]
        # An abort is how C++ reacts to a lost peer, so it may be a consequence too.
        killed = [number for number in silent if codes[number] != -signal.SIGABRT]
        if killed or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for number in killed or silent:
        how = f"{'was ' if codes[number] < 0 else ''}{describe_exit(codes[number], when=when(number))}"
        return Failure(message=f"{name(number)} {how}", rank=number)
    return said[0]
