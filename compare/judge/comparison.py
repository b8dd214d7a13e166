"""A comparison: what was asked of each case, what came of it, and the verdicts; saved as outcome.json.

The file is written before the first case starts and after each one, so that whatever ends a run leaves what
was finished, and what is still to do.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import field

from compare.contract.record import Record, read_record
from compare.contract.request import Request
from compare.host.json_files import FolderName
from compare.host.tensors import RecordError
from compare.judge.costs import Cost, cost_of
from compare.judge.goldens import NANOGPT, folder_of, read_golden
from compare.judge.kept_rungs import with_kept_rungs, without_ladder
from compare.judge.ladder import Verdict, climb, objections_by_itself
from compare.judge.outcome import OUTCOME, StudyOutcome, read_outcome
from compare.judge.strategy import asked_of
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import MAX_CPU_DEVICES
from compare.spec.sections import Precision

COMPARISON = OUTCOME
FAULTS = "faults"
"""The study whose cases are asked for other trainings on purpose."""
GOLDEN = "golden"
"""The study whose reference is no case, but nanoGPT."""
LISTED = 4  # names in a one-line verdict; more are counted
MAX_GPUS, MAX_STEPS = 2**16, 10**7
"""More of them than any record of ours has; judging such a one would take for ever."""
IN_PARTS = ("matrix", "sweep")
"""Commands whose comparisons lie side by side in one folder, from which they go on."""


class Comparison(StudyOutcome, frozen=True, kw_only=True):
    """The outcome so far: every case's request, verdict and cost."""

    requests: dict[FolderName, Request]
    """What was asked of every case, by name, in the order in which they run."""
    cases: list[FolderName] = field(default_factory=list)
    """Cases that finished, in that order; their names are folders. The first is the reference (of faults one
    for each precision)."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Of every finished case but the first; of golden of every one."""
    costs: list[Cost] = field(default_factory=list)
    """Of every finished case."""
    versions: list[dict[str, str]] = field(default_factory=list)
    """Of Python and the packages that ran every finished case."""
    failures: dict[str, str] = field(default_factory=dict)
    """Cases that did not finish: why, by name."""
    device_kind: str = ""
    """The reference's device, as its framework names it."""
    objections: list[str] = field(default_factory=list)
    """What a case that finished alone did otherwise than it was asked; beside others the verdicts say it."""
    tensors_removed: bool = False
    """The ladder's tensors were removed once all had passed: their rungs are kept (`kept_rungs`)."""

    @property
    def is_blank(self) -> bool:
        """True before the first case has finished."""
        return not self.cases

    @property
    def progress(self) -> str:
        """3 of 5 cases."""
        return f"{len(self.cases)} of {len(self.requests)} cases"

    @property
    def not_run(self) -> list[str]:
        """Cases whose turn did not come."""
        return [name for name in self.requests if name not in self.cases and name not in self.failures]

    @property
    def is_complete(self) -> bool:
        """True if every case finished."""
        return not self.failures and not self.not_run

    @property
    def passed(self) -> bool:
        """True if every case finished as it was asked, and agrees with the reference on every rung."""
        return self.is_complete and not self.objections and all(verdict.passed for verdict in self.verdicts)

    def sentence(self) -> str:
        """The verdict over all cases, in one line; what was not run or not compared is said."""
        bad = next((verdict for verdict in self.verdicts if not verdict.passed), None)
        if bad:
            return f"{bad.candidate} against {bad.reference}: {bad.sentence()}{self._what_is_missing()}"
        if self.objections:
            wrong = "; ".join(self.objections)
            return f"{self.cases[0]} alone: FAIL at request: {wrong}{self._what_is_missing()}"
        if not self.is_complete:
            return f"INCOMPLETE: {self._what_agrees()}{self._what_is_missing()}"
        if not self.verdicts:
            return f"{self.cases[0]} ran alone: there was nothing to compare it with{self._left_out()}"
        return f"PASS: {self._what_agrees()}{self._left_out()}"

    def how_to_go_on(self, folder: Path) -> str:
        """The command that runs what it still lacks: with the study whose part it is."""
        return super().how_to_go_on(folder.parent if self.study in IN_PARTS else folder)

    def _what_agrees(self) -> str:
        if not self.cases:
            return "nothing has finished"
        if not self.verdicts:
            return f"only {self.cases[0]} has finished"
        names = [verdict.candidate for verdict in self.verdicts]
        reference = self.verdicts[0].reference
        others = ", ".join(names) if len(names) <= LISTED else f"{len(names)} cases"
        agree = "agrees" if len(self.verdicts) == 1 else "agree"
        if not all(verdict.compared_tensors for verdict in self.verdicts):
            what = "gradients and weights"
            if all(verdict.error("later_weights") is not None for verdict in self.verdicts):
                what = "the gradients of the first step, which overflowed and was skipped,"
            return f"the losses of {others} agree with those of {reference}; {what} were not compared"
        rungs = min(len(verdict.rungs) for verdict in self.verdicts)
        return f"{others} {agree} with {reference} on {rungs} rungs"

    def _what_is_missing(self) -> str:
        failed = [
            why if why.startswith(f"{name} ") else f"{name} did not finish ({why})"
            for name, why in self.failures.items()
        ]
        waiting = [f"{', '.join(self.not_run)} did not run"] if self.not_run else []
        return "".join(f"; {part}" for part in [*failed, *waiting]) + self._left_out()

    def _left_out(self) -> str:
        return "".join(f"; {name} was left out ({why})" for name, why in self.left_out.items())


def judged(
    comparison: Comparison, records: Mapping[str, Record], *, known: Sequence[Verdict] = ()
) -> Comparison:
    """The comparison with the verdicts and costs that these records give.

    Args:
        comparison: its requests give the order.
        records: those of the finished cases, by name.
        known: verdicts over these records that need not be found again.

    Raises:
        RecordError: a file of tensors is garbled.
    """
    cases = [name for name in comparison.requests if name in records]
    references = _references(comparison, cases)
    found = {verdict.candidate: verdict for verdict in known if verdict.reference in references.values()}
    return msgspec.structs.replace(
        comparison,
        device_kind=records[cases[0]].manifest.device_kind if cases else "",
        cases=cases,
        verdicts=[
            found.get(name)
            or climb(
                _golden(comparison, name) if comparison.study == GOLDEN else records[references[name]],
                records[name],
                reference_name=references[name],
                name=name,
                same_training=comparison.study != FAULTS,
            )
            for name in cases
            if name != references[name]
        ],
        costs=[cost_of(records[name]) for name in cases],
        versions=[records[name].manifest.versions for name in cases],
        failures={name: why for name, why in comparison.failures.items() if name not in records},
        objections=objections_by_itself(records[cases[0]]) if len(cases) == 1 else [],
    )


def _references(comparison: Comparison, cases: list[str]) -> dict[str, str]:
    """What each case is held against: the first. Of faults, some of which show in 16 bits alone, the first in
    the precision that the case was asked for."""
    if comparison.study == GOLDEN:
        return dict.fromkeys(cases, NANOGPT)
    if comparison.study != FAULTS:
        return dict.fromkeys(cases, cases[0]) if cases else {}
    first: dict[Precision, str] = {}
    return {name: first.setdefault(comparison.requests[name].experiment.precision, name) for name in cases}


def _golden(comparison: Comparison, name: str) -> Record:
    """nanoGPT's record of the training that a case was asked for. Raises RecordError: it is damaged."""
    return read_golden(folder_of(comparison.requests[name].experiment.optimizer.name))[0]


def read_saved(folder: Path) -> Comparison:
    """The comparison as it was saved.

    Raises:
        RecordError: there is none, or it is garbled.
    """
    return read_outcome(folder, Comparison)


def read_comparison(folder: Path) -> tuple[Comparison, list[Record]]:
    """A comparison judged anew from its records, and these.

    Raises:
        RecordError: there is none, a file is garbled or says what cannot be, or nothing had finished.
    """
    saved = read_saved(folder)
    records = {name: read_record(folder / name) for name in saved.cases}
    for name, record in records.items():
        if record.request != saved.requests.get(name):
            raise RecordError(f"{folder / name} holds another run than {folder / COMPARISON} asked for")
    if not records:
        raise RecordError(f"nothing has finished in {folder}: `{saved.how_to_go_on(folder)}` goes on")
    for record in records.values():
        require_judgeable(record)
    try:
        return _judged_again(saved, records), list(records.values())
    except (LookupError, ValueError, ArithmeticError) as error:  # figures that no run leaves
        why = f"{type(error).__name__}: {error}"
        raise RecordError(f"the records in {folder} cannot be judged ({why}): they were changed") from error


def _judged_again(saved: Comparison, records: dict[str, Record]) -> Comparison:
    """Judged anew; rungs of tensors that were removed are those that were saved."""
    if not saved.tensors_removed:
        return judged(saved, records)
    found = judged(saved, {name: without_ladder(record) for name, record in records.items()})
    before = {verdict.candidate: verdict for verdict in saved.verdicts}
    verdicts = [
        with_kept_rungs(verdict, before[verdict.candidate]) if verdict.candidate in before else verdict
        for verdict in found.verdicts
    ]
    return msgspec.structs.replace(found, verdicts=verdicts)


def require_judgeable(record: Record) -> None:
    """Refuse what nobody here can judge, or not in a lifetime. Raises RecordError, which names the folder."""
    manifest, folder = record.manifest, record.folder
    if manifest.engine not in ENGINES:
        raise RecordError(f"{folder} is of {manifest.engine}, and here are {', '.join(ENGINES)}")
    devices, platform = asked_of(record).layout.devices, manifest.platform
    if devices > (MAX_CPU_DEVICES if platform == "cpu" else MAX_GPUS):
        raise RecordError(f"{folder} says that it ran on {devices} {platform.upper()} devices")
    if (asked := asked_of(record).train.max_iters) > MAX_STEPS and len(record.steps) < MAX_STEPS:
        raise RecordError(f"{folder} has {len(record.steps)} of {asked} steps: it is not a finished run")


def differences(saved: Comparison, anew: Comparison) -> list[str]:
    """Points at which the records no longer give the verdict that was saved with them, a line each.

    An error may move in its last digits between two versions of NumPy; more is told.
    """
    lines = []
    for before, now in zip(saved.verdicts, anew.verdicts, strict=False):
        errors = {result.rung: result.error for result in before.rungs}
        moved = [
            result.rung
            for result in now.rungs
            if result.rung not in errors or not _is_the_same(errors[result.rung], result.error)
        ]
        if before.sentence() != now.sentence() or moved or before.skipped != now.skipped:
            where = f" (moved: {', '.join(moved)})" if moved else ""
            lines.append(
                f"{now.candidate}: the records no longer give the saved verdict: {before.sentence()} was "
                f"saved, they give {now.sentence()}{where}"
            )
    return lines


def _is_the_same(before: float, now: float) -> bool:
    if not math.isfinite(before) or not math.isfinite(now):  # JSON has no infinity: it comes back as NaN
        return math.isfinite(before) == math.isfinite(now)
    return math.isclose(before, now, rel_tol=1e-6, abs_tol=1e-18)
