"""What processes of a run tell each other: at the start what they run on, in the end why it ends.

They meet in the folder of the run where collectives do not reach: a process that waits for a lost one.
"""

import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from compare.contract.record import HOSTS, WAITING, Failure, read_failure
from compare.host.facts import versions
from compare.host.json_files import read_json, write_json
from compare.host.signals import describe_exit
from compare.numerics.data import open_corpus
from compare.spec.experiment import Experiment, ExperimentError

POLL_S = 0.05
CAUSE_GRACE_S = 2.0
SETTLED_S = 3.0
"""Processes begin to wait within a step of each other, and see the time-out so much apart."""


class HostFacts(Struct, frozen=True, kw_only=True):
    """What a process runs on, as far as its numbers depend on it."""

    host: str
    versions: dict[str, str]
    corpus_sha256: str = ""
    """Of the tokens as this host reads them; '' from all but one process of a host."""


def facts_here(packages: Iterable[str], reads: Experiment | None = None) -> HostFacts:
    """Those of this process; of an experiment that it reads the data for, all of them are read."""
    return HostFacts(
        host=socket.gethostname(),
        versions=versions(packages),
        corpus_sha256=open_corpus(reads).sha256 if reads else "",
    )


def agree(found: Sequence[HostFacts], folder: Path, *, is_first: bool) -> None:
    """Hold what the processes run on against what the first does, which leaves the names of their hosts.

    Raises:
        ExperimentError: a package of another version, or other data; both hosts are named.
    """
    first = found[0]
    for other in found[1:]:
        for package, version in first.versions.items():
            if (theirs := other.versions.get(package, "none")) != version:
                raise ExperimentError(
                    f"{other.host} has {package} {theirs}, and {first.host} {version}: install the same on "
                    f"all hosts"
                )
        if other.corpus_sha256 and other.corpus_sha256 != first.corpus_sha256:
            raise ExperimentError(
                f"{other.host} reads other data than {first.host}: SHA-256 of the tokens "
                f"{other.corpus_sha256[:12]} and {first.corpus_sha256[:12]}: put the same file on all hosts"
            )
    if is_first:
        write_json(folder / HOSTS, [facts.host for facts in found])


def host_names(places: Iterable[tuple[str, int]]) -> list[str]:
    """The host of each process, from the machine's name and the process's number on its host.

    Two with the same number are on two hosts, though the machine be one in a test: `box`, `box (2)`.
    """
    seen, names = Counter[tuple[str, int]](), []
    for place in places:
        seen[place] += 1
        names.append(place[0] if seen[place] == 1 else f"{place[0]} ({seen[place]})")
    return names


def hosts_in(folder: Path) -> dict[int, str]:
    """The host of each process; {} before all have met."""
    path = folder / HOSTS
    return dict(enumerate(read_json(path, list[str]))) if path.is_file() else {}


class Waiting(Struct, frozen=True, kw_only=True):
    """A process in which nothing has moved for the time-out."""

    number: int
    where: str
    """`step 5, forward`."""
    beats: int = 0
    """Of two that run the same sequence, the one with fewer is behind."""


def blame_for_hang(folder: Path, own: Waiting, *, count: int, timeout_s: float) -> Failure:
    """The cause of a hang, as every running process finds it: who does not answer, or who is behind."""
    files = {number: folder / f"{WAITING}{number}.json" for number in range(count)}
    write_json(files[own.number], own)
    time.sleep(SETTLED_S)
    if (said := read_failure(folder)) and not said.is_consequence:
        return said
    waiting = {n: read_json(path, Waiting) for n, path in files.items() if path.is_file()}
    silent = [number for number in range(count) if number not in waiting]
    return blame(waiting, silent, timeout_s=timeout_s, hosts=hosts_in(folder))


def blame(
    waiting: Mapping[int, Waiting],
    stuck: Sequence[int],
    *,
    timeout_s: float,
    state: str = "gave no answer",
    noun: str = "process",
    hosts: Mapping[int, str] = {},
) -> Failure:
    """Failure of a hang: it names those that are stuck, in this state, or else those behind all others."""
    fewest = min((place.beats for place in waiting.values()), default=0)
    behind = stuck or [number for number, place in waiting.items() if place.beats == fewest]
    others = [number for number in waiting if number not in behind]
    by_host = defaultdict[str, list[int]](list)
    for number in behind:
        by_host[hosts.get(number, "")].append(number)
    if not stuck:
        where = waiting[behind[0]].where
        if not others and len(behind) > 1:
            link = f", on {', '.join(by_host)}: is the link between them cut?" if any(by_host) else ""
            return Failure(message=f"no {noun} made progress for {timeout_s:g} s: all wait in {where}{link}")
        state = f"stayed in {where}"
    named = " and ".join(f"{numbered(noun, each)}{name and f' on {name}'}" for name, each in by_host.items())
    message = f"{named} {state}: no progress for {timeout_s:g} s"
    if others:
        there = ", ".join(dict.fromkeys(waiting[number].where for number in others))
        message += f", while {numbered(noun, others)} waited in {there}"
    return Failure(message=message, rank=behind[0])


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """For a sentence: `rank 1`, `processes 2, 3`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{plural if len(numbers) > 1 else noun} {', '.join(map(str, numbers))}"


def first_cause(
    ended: Callable[[], Mapping[int, int]],
    said: Callable[[], Sequence[Failure]],
    *,
    name: Callable[[int], str],
    when: Callable[[int], str] = lambda number: "",
) -> Failure:
    """The cause of an end: a process's own error, else a death, else an error that tells of a lost process.

    `ended` gives the exit codes of processes that have failed, `said` the errors that they left: some may
    notice a lost one before we do, so both are asked again for a while.
    """
    deadline = time.monotonic() + CAUSE_GRACE_S
    while True:
        codes, failures = ended(), said()  # in this order: who fails speaks first
        if causes := [failure for failure in failures if not failure.is_consequence]:
            return causes[0]
        silent = [number for number in codes if number not in [failure.rank for failure in failures]]
        # An abort is how C++ reacts to a lost peer, so it may be a consequence too.
        killed = [number for number in silent if codes[number] != -signal.SIGABRT]
        if killed or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for number in killed or silent:
        how = f"{'was ' if codes[number] < 0 else ''}{describe_exit(codes[number], when=when(number))}"
        return Failure(message=f"{name(number)} {how}", rank=number)
    return failures[0]
