"""`outcome.json`: the request of a study, the values that it found, and its judgements.

The file is written before the first case and after each case. If a study ends early, the file lists the
finished cases and the missing ones.
"""

import shlex
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from compare.contract.record import Record, file_sums, read_record, require_folder
from compare.contract.request import Platform, Request
from compare.judge.alone import STRATEGY, UPDATE, Alone, Judged, judged
from compare.judge.goldens import NANOGPT, judged_golden
from compare.judge.verdict import Verdict, climb
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment
from compare.system.json_files import read_json, write_json
from compare.system.tensors import RecordError

T = TypeVar("T")
OUTCOME = "outcome.json"
LISTED = 4  # names in a one-line verdict; more are counted
SUBJECTS = {"loss": "loss", "gradients": "gradients", "first_weights": "weights", UPDATE: "optimizer"}
"""Rung -> the word for it in a verdict."""


class Case(Struct, frozen=True, kw_only=True):
    """A process to run, its place in tables, and its reference."""

    request: Request
    coordinates: dict[str, str] = {}
    """Place in tables: `layout` (a preset and its devices), `size` (fields that change the work), `variant`
    (fields that do the same work another way), `copy` (2 for an engine that is named twice), and others that
    a study needs. A coordinate without a value is missing."""
    against: str = ""
    """The reference of its verdict: a case, or nanoGPT; '' for none."""
    same_training: bool = True
    """The reference was asked for the same training; false with a planted mistake."""

    @property
    def engine(self) -> str:
        return self.request.engine

    @property
    def experiment(self) -> Experiment:
        return self.request.experiment

    @property
    def label(self) -> str:
        """Name within its block: torch-manual, torch-manual (2), torch-manual layout.bucket_mb=1."""
        copy, variant = (self.coordinates.get(key) for key in ("copy", "variant"))
        return " ".join(filter(None, (self.engine, copy and f"({copy})", variant)))

    @property
    def block(self) -> str:
        """The cases whose figures are divided by each other: layout and size."""
        return self._joined("layout", "size")

    @property
    def row(self) -> str:
        """Its row in a table with a column for each engine."""
        return self._joined("layout", "size", "variant")

    @property
    def name(self) -> str:
        """A unique name among engines x layouts x sizes x variants."""
        return f"{self.label}.{self.block}" if self.block else self.label

    def _joined(self, *keys: str) -> str:
        return ", ".join(self.coordinates[key] for key in keys if self.coordinates.get(key))


class Circumstances(Struct, frozen=True, kw_only=True):
    """Time, machine and source version of a study."""

    created_utc: str = ""
    system: str = ""
    cpu_model: str = ""
    cores: int = 0
    memory_bytes: int = 0
    git_commit: str = ""
    git_dirty: bool = False
    versions: dict[str, str] = {}
    """Versions of Python and the frameworks."""
    used_by_others: dict[str, float] = {}
    """Cores that other processes used while a case ran, by case; the most of its rounds."""

    @property
    def made_by(self) -> str:
        """The version of shardpair, in words."""
        if not self.git_commit:
            return "shardpair, not from a git checkout"
        return f"shardpair {self.git_commit[:12]}{' with uncommitted changes' if self.git_dirty else ''}"

    @property
    def words(self) -> str:
        """The version, the machine, the time and the load, for the end of a page."""
        most = max(self.used_by_others.values(), default=None)
        busy = "" if most is None else f" Other processes used up to {most:.2f} cores."
        return (
            f"{self.made_by}. {self.system}, {self.cpu_model}, {self.cores} cores. "
            f"{self.created_utc[:16].replace('T', ' ')} UTC.{busy}"
        )


Grid = tuple[dict[str, Case], dict[str, str]]
"""Cases by name, references first; and the reasons why others cannot run, by name."""


class Outcome(Struct, frozen=True, kw_only=True):
    """Outcome of any study so far."""

    study: str
    """Name of its command."""
    name: str
    """Title, and name of its folder."""
    line: str = ""
    """The command line that started it."""
    experiment: Experiment
    """The experiment that the user gave."""
    platform: Platform = "cpu"
    options: dict[str, Any] = {}
    """The study's own flags."""
    circumstances: Circumstances = Circumstances()
    rounds: Annotated[int, Meta(ge=1)] = 1
    cases: dict[str, Case] = {}
    """Cases in the order in which they run; a name is a folder."""
    left_out: dict[str, str] = {}
    """Reasons why others cannot run, by name."""
    keeps_records: bool = False
    """Each finished case has its record in the folder of its name."""
    kept: dict[str, dict[int, Any]] = {}
    """Values that the study kept of each case, by round, from 1."""
    alone: dict[str, Alone] = {}
    """Judgement of each record without another."""
    verdicts: list[Verdict] = []
    """Comparison of each finished case with its reference."""
    failures: dict[str, str] = {}
    """Reasons why cases did not finish, by name."""
    tensors_removed: bool = False
    """The ladder's tensors were removed once all had passed."""

    @property
    def finished(self) -> list[str]:
        """Cases with a value, in their order."""
        return [name for name in self.cases if self.kept.get(name)]

    def missing(self, number: int) -> list[str]:
        """Cases without a value in a round."""
        return [name for name in self.cases if number not in self.kept.get(name, {})]

    @property
    def finished_rounds(self) -> int:
        """Number of complete rounds."""
        kept = {number for values in self.kept.values() for number in values if 1 <= number <= self.rounds}
        return sum(not self.missing(number) for number in kept)

    @property
    def is_complete(self) -> bool:
        """True if no case failed, lacks a round, or lacks its verdict."""
        return not self.undone and self.finished_rounds == self.rounds

    @property
    def passed(self) -> bool:
        """True if every case finished, and every case agrees with its reference."""
        return self.is_complete and all(verdict.passed for verdict in self.verdicts)

    @property
    def progress(self) -> str:
        """Number of finished cases or rounds, as `3 of 5 cases`."""
        if self.rounds > 1:
            return f"{self.finished_rounds} of {self.rounds} rounds"
        return f"{len(self.finished)} of {len(self.cases)} cases"

    def values(self, type: type[T]) -> dict[str, T]:
        """The value of each finished case in its last round."""
        last = {name: self.kept[name][max(self.kept[name])] for name in self.finished}
        return {name: msgspec.convert(value, type) for name, value in last.items()}

    def how_to_go_on(self, folder: Path) -> str:
        """The command that runs the missing cases of a study in this folder."""
        return f"shardpair {self.study} --continue {shlex.quote(str(folder))}"

    @property
    def undone(self) -> dict[str, str]:
        """Cases that failed, did not run, or have no verdict, with the reason."""
        whys = {name: f"did not finish: {why}" for name, why in self.failures.items()}
        judged = {verdict.candidate for verdict in self.verdicts}
        for name, case in self.cases.items():
            if not self.kept.get(name):
                whys.setdefault(name, "did not run")
            elif case.against and name not in judged:
                whys.setdefault(name, "has no reference to compare with")
        return whys

    def sentence(self) -> str:
        """The verdict over all cases, with missing and uncompared cases, in one line."""
        names = ", ".join(self.left_out) if len(self.left_out) <= LISTED else f"{len(self.left_out)} cases"
        left_out = [f"{names} {'was' if len(self.left_out) == 1 else 'were'} left out"] * bool(self.left_out)
        bad = next((verdict for verdict in self.verdicts if not verdict.passed), None)
        if bad:
            first = f"{bad.candidate} against {bad.reference}: {bad.sentence()}"
        elif not self.is_complete:
            first = f"INCOMPLETE: {self._agreement()}"
        elif not self.verdicts and self.finished:
            first = f"{self.finished[0]} ran alone: there was nothing to compare it with"
        else:
            first = f"PASS: {self._agreement()}"
        return "; ".join([first, *(f"{name} {why}" for name, why in self.undone.items()), *left_out])

    def _agreement(self) -> str:
        if not self.finished:
            return "nothing has finished"
        if not self.verdicts:
            return "nothing was compared"
        names = [verdict.candidate for verdict in self.verdicts]
        of = dict.fromkeys(verdict.reference for verdict in self.verdicts)
        others, references = ", ".join(names), ", ".join(of)
        if len(names) > LISTED:
            others = f"{len(names)} cases"
        if any({"gradients", "first_weights"} & verdict.skipped.keys() for verdict in self.verdicts):
            subject = "gradients and weights"
            if all(verdict.error("later_weights") is not None for verdict in self.verdicts):
                subject = "the gradients of the first step, which overflowed and was skipped,"
            return f"the losses of {others} agree with {references}; {subject} were not compared"
        reasons: dict[str, dict[str, None]] = {}
        for what, why in (item for verdict in self.verdicts for item in verdict.uncompared.items()):
            reasons.setdefault(what, {})[why] = None
        uncompared = [f"not compared: {what} ({', '.join(whys)})" for what, whys in reasons.items()]
        if any(case.coordinates for case in self.cases.values()):
            who, like = f"{others} compute{'s' * (len(names) == 1)}", f" as {references}"
        else:  # engines under one layout
            engines, is_all = [*of, *names], self.is_complete and not self.left_out
            who, like = f"{', '.join(engines[:-1])} and {engines[-1]} compute", ""
            if len(engines) > LISTED:
                who = f"{'all ' * is_all}{len(engines)} engines compute"
        what = [word for rung, word in SUBJECTS.items() if all(one.result(rung) for one in self.verdicts)]
        checks = min(len(verdict.rungs) for verdict in self.verdicts)
        return "; ".join([f"{who} the same{like} ({', '.join(what)}: {checks} checks)", *uncompared])


def with_case(
    outcome: Outcome, name: str, value: Any, record: Record, folder: Path, *, number: int = 1
) -> Outcome:
    """The outcome with the value of one more finished case, the judgement of its record, and its verdict.

    A case whose reference failed is compared with the first case that finished. If the reference finishes
    later, all its cases are compared again. Records of references are in the study's folder.

    Raises RecordError: a record cannot be read, or a reference did not do what it was asked for.
    """
    this, skip = judged(record, name), {}
    objections = this.alone.objections
    if outcome.options.get("numbers_only"):
        skip, objections = {STRATEGY: "--numbers_only"}, this.alone.request
    if not outcome.cases[name].against and objections:
        raise RecordError(f"FAIL at request: {'; '.join(objections)}")
    rounds = outcome.kept.get(name, {}) | {number: msgspec.to_builtins(value)}
    versions = outcome.circumstances.versions | record.manifest.versions
    outcome = replace(
        outcome,
        kept=outcome.kept | {name: rounds},
        failures={failed: why for failed, why in outcome.failures.items() if failed != name},
        circumstances=replace(outcome.circumstances, versions=versions),
        alone=outcome.alone | {name: this.alone},
    )
    verdicts = {verdict.candidate: verdict for verdict in outcome.verdicts}
    compared = {verdict.candidate for verdict in outcome.verdicts if verdict.reference == name}
    late = [one for one in outcome.finished if outcome.cases[one].against == name and one not in compared]
    for candidate in [name, *late]:
        if reference := _reference_of(outcome, candidate):
            optimizer = outcome.cases[candidate].experiment.optimizer.name
            verdicts[candidate] = climb(
                judged_golden(optimizer) if reference == NANOGPT else _read(outcome, reference, folder),
                this if candidate == name else _read(outcome, candidate, folder),
                same_training=outcome.cases[candidate].same_training,
                skip=skip,
            )
    return replace(outcome, verdicts=[verdicts[name] for name in outcome.cases if name in verdicts])


def _read(outcome: Outcome, name: str, folder: Path) -> Judged:
    return Judged(name, _judged_record(outcome, name, folder), outcome.alone[name])


def _judged_record(outcome: Outcome, name: str, folder: Path) -> Record:
    """The record of a finished case. Raises RecordError: a file is not the one that was judged."""
    require_judged(outcome, name, folder)
    return read_record(folder / name)


def require_judged(outcome: Outcome, name: str, folder: Path) -> None:
    """Reject a finished case whose files are not those that were judged. Raises RecordError."""
    require_folder(folder / name)
    if (sums := outcome.alone[name].sums) and (odd := sums.items() ^ file_sums(folder / name).items()):
        file = folder / name / min(odd)[0]
        raise RecordError(f"{file} has changed since it was judged: put it back, or begin a new run")


def _reference_of(outcome: Outcome, name: str) -> str:
    """The reference of a case; if it did not finish, the first finished case with the same reference."""
    against = outcome.cases[name].against
    if not against or against == NANOGPT or outcome.kept.get(against):
        return against
    beside = (other for other in outcome.finished if outcome.cases[other].against == against)
    return next((other for other in beside if other != name), "")


def save(outcome: Outcome, folder: Path) -> None:
    """Write outcome.json."""
    write_json(folder / OUTCOME, outcome)


def read_outcome(folder: Path) -> Outcome:
    """A study as it was saved. Raises RecordError: there is none, or it is damaged."""
    if not (folder / OUTCOME).is_file():
        raise RecordError(f"{folder} has no {OUTCOME}: it is not the folder of a `shardpair run`")
    outcome = read_json(folder / OUTCOME, Outcome)
    if unknown := [case.engine for case in outcome.cases.values() if case.engine not in ENGINES]:
        raise RecordError(f"{folder / OUTCOME} is damaged: engine {unknown[0]} is unknown")
    if outside := [name for name in outcome.cases if name in ("", ".", "..") or "/" in name]:
        raise RecordError(f"{folder / OUTCOME} is damaged: {outside[0]!r} is not the name of a folder in it")
    unjudged = [name for name in outcome.finished if name not in outcome.alone]
    if outcome.keeps_records and unjudged:
        raise RecordError(f"{folder / OUTCOME} is damaged: it has no judgement of {unjudged[0]}")
    return outcome


def read_run(folder: Path) -> tuple[Outcome, dict[str, Record]]:
    """A study whose cases left records, and these by name. Raises RecordError: one is garbled, or none."""
    outcome = read_outcome(folder)
    records = {name: _judged_record(outcome, name, folder) for name in outcome.finished}
    if not records:
        raise RecordError(f"nothing has finished in {folder}: `{outcome.how_to_go_on(folder)}` goes on")
    return outcome, records
