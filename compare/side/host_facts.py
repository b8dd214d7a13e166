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
    """What a process runs on, as far as its numbers depend on it."""

    host: str
    versions: dict[str, str]
    """Of shardpair the beginning of the SHA-256 of its source."""
    corpus_sha256: str = ""
    """Of the tokens as this host reads them; '' from all but one process of a host."""


def facts_here(side: str, packages: Iterable[str], reads: Experiment | None = None) -> HostFacts:
    """Those of this process of a side; of an experiment that it reads the data for, all of them are read."""
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


def agree(found: Sequence[HostFacts]) -> None:
    """Hold what the processes run on against what the first does.

    Raises ExperimentError: a package of another version, or other data; both hosts are named.
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


def host_names(places: Iterable[tuple[str, int]]) -> list[str]:
    """The host of each process, from the machine's name and the process's number on its host.

    Two with the same number are on two hosts, though the machine be one in a test: `box`, `box (2)`.
    """
    seen, names = Counter[tuple[str, int]](), []
    for place in places:
        seen[place] += 1
        names.append(place[0] if seen[place] == 1 else f"{place[0]} ({seen[place]})")
    return names
