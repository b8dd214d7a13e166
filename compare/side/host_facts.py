"""Check that all hosts of a run have the same package versions, source and data."""

import hashlib
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from msgspec import Struct

from compare.numerics.data import open_corpus
from compare.spec.experiment import Experiment, ExperimentError
from compare.system.facts import versions


class HostFacts(Struct, frozen=True, kw_only=True):
    """Facts of a process's host that its numbers depend on."""

    host: str
    versions: dict[str, str]
    """Package versions; for shardpair the beginning of the SHA-256 of its source."""
    corpus_sha256: str = ""
    """SHA-256 of the tokens, from one process of each host; '' from the other processes."""


def facts_here(side: str, packages: Iterable[str], reads: Experiment | None = None) -> HostFacts:
    """The facts of this process. `reads` is an experiment whose tokens are read and hashed."""
    return HostFacts(
        host=socket.gethostname(),
        versions=versions(packages) | {"shardpair": source_sha256("compare", side)[:12]},
        corpus_sha256=open_corpus(reads).sha256 if reads else "",
    )


def source_sha256(*packages: str) -> str:
    """The SHA-256 of all Python files of packages, with their names."""
    digest = hashlib.sha256()
    for root in map(files, packages):
        for path in sorted(Path(f"{root}").rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(f'{root}')} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def agree(facts: Sequence[HostFacts]) -> None:
    """Compare the facts of all processes with the first process's facts.

    Raises ExperimentError with both hosts: a package has another version, or the data differs.
    """
    first = facts[0]
    for other in facts[1:]:
        for package, version in first.versions.items():
            if (found := other.versions.get(package, "none")) != version:
                raise ExperimentError(
                    f"{other.host} has {package} {found}, and {first.host} {version}: install the same on "
                    f"all hosts"
                )
        if other.corpus_sha256 and other.corpus_sha256 != first.corpus_sha256:
            raise ExperimentError(
                f"{other.host} reads other data than {first.host}: SHA-256 of the tokens "
                f"{other.corpus_sha256[:12]} and {first.corpus_sha256[:12]}: put the same file on all hosts"
            )


def host_names(places: Iterable[tuple[str, int]]) -> list[str]:
    """The host of each process, from the machine's name and the process's number on its host.

    Two processes with the same number are on two hosts. Simulated hosts on one machine get numbers: `box`,
    `box (2)`.
    """
    counts, names = Counter[tuple[str, int]](), []
    for place in places:
        counts[place] += 1
        names.append(place[0] if counts[place] == 1 else f"{place[0]} ({counts[place]})")
    return names
