"""The outcome of a study: what was asked, every single value that was found, and how; saved as outcome.json.

`PartsOutcome` is of a study whose parts were each measured once; `timed_outcome` has that of timed processes.
"""

import shlex
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct

from compare.contract.request import Platform
from compare.host.json_files import read_result, write_json
from compare.judge.circumstances import Circumstances
from compare.spec.experiment import Experiment

R = TypeVar("R")
OUTCOME = "outcome.json"


class Outcome(Struct, frozen=True, kw_only=True):
    """Outcome of any study so far: which study, of what, and under which circumstances."""

    study: str
    """The word of its command."""
    name: str
    """For people, and of its folder."""
    platform: Platform
    circumstances: Circumstances = Circumstances()
    left_out: dict[str, str] = {}
    """What could not be a case, by name, and why."""

    @property
    def is_blank(self) -> bool:
        """True if nothing was measured yet."""
        raise NotImplementedError

    @property
    def progress(self) -> str:
        """How much of it is there: 3 of 5 rounds."""
        raise NotImplementedError

    def sentence(self) -> str:
        """The verdict in a line; '' where `Findings` alone tell it."""
        return ""

    @property
    def reasons(self) -> list[str]:
        """Why something was not measured, a line each."""
        return []

    def how_to_go_on(self, folder: Path) -> str:
        """The command that runs what a study in this folder still lacks."""
        return f"shardpair {self.study} --continue {shlex.quote(str(folder))}"


class StudyOutcome(Outcome, frozen=True, kw_only=True):
    """Outcome of a study of an experiment."""

    experiment: Experiment
    """As the user gave it."""


AnyOutcome = TypeVar("AnyOutcome", bound=Outcome)


class PartsOutcome(StudyOutcome, Generic[R], frozen=True, kw_only=True):
    """Outcome of a study whose parts are each measured once: see `compare.study.Survey`."""

    options: dict[str, Any] = {}
    """The study's own flags, by name: with the experiment they say what its parts are."""
    parts: list[str]
    """In the order in which they are measured."""
    results: dict[str, R] = {}
    """By part."""
    failures: dict[str, str] = {}
    """Parts that did not finish, and why."""

    @property
    def is_blank(self) -> bool:
        """True before the first result."""
        return not self.results

    @property
    def progress(self) -> str:
        """3 of 5 parts."""
        return f"{len(self.results)} of {len(self.parts)} parts"

    @property
    def reasons(self) -> list[str]:
        """Parts that did not finish, and why."""
        return [f"{name}: {why}" for name, why in self.failures.items()]

    @property
    def missing(self) -> list[str]:
        """Parts that have no result."""
        return [name for name in self.parts if name not in self.results]


def save(result: Outcome, folder: Path) -> None:
    """Write outcome.json."""
    write_json(folder / OUTCOME, result)


def read_outcome(folder: Path, kind: type[AnyOutcome]) -> AnyOutcome:
    """A study as it was saved.

    Args:
        folder: of its results.
        kind: its study's `kept`; `Outcome` itself for what all have.

    Raises:
        RecordError: there is none, or it is garbled.
    """
    return read_result(folder / OUTCOME, kind, command="run")
