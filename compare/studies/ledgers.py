"""The ledgers of engines under layouts, lined up with the closed form of each."""

from pathlib import Path

from msgspec import Struct, field

from compare.contract.record import Record
from compare.judge.ledger_lines import Line, line_up
from compare.judge.outcome import read_run
from compare.judge.strategy import with_remat_resolved
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment

PACKAGES = ("python", "jax", "torch")
PEER = "a peer has ways of its own: there is no closed form of what it sends"


class EngineLedger(Struct, frozen=True, kw_only=True):
    """What one engine communicates under one layout, beside the closed form."""

    case: str
    engine: str
    experiment: Experiment
    """As it was run, with `layout.remat` resolved."""
    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be read, or has no closed form: the ledger is incomplete."""

    @property
    def unexplained(self) -> list[Line]:
        """Lines that are not as expected, that no known pattern explains, and that were not seen before."""
        return [line for line in self.lines if line.is_new]

    @property
    def passed(self) -> bool:
        """True if all of it could be read, and none of it is unexplained and new."""
        return not self.problems and not self.unexplained


class LedgerStudy(Struct, frozen=True, kw_only=True):
    """The ledgers of a run's cases, and the cases that have none."""

    ledgers: list[EngineLedger]
    missing: dict[str, str] = field(default_factory=dict)
    """Why a case that should have one has none, by its name: it failed, or did not run."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why others are no case, or have no closed form, by name."""
    versions: str = ""
    """What ran them, in words."""

    @property
    def passed(self) -> bool:
        """True if no case is missing, and each has passed."""
        return not self.missing and all(ledger.passed for ledger in self.ledgers)

    def sentence(self) -> str:
        """How many cases there are, how many of their lines are as expected, explained, seen before, new."""
        lines = [line for ledger in self.ledgers for line in ledger.lines]
        expected = sum(line.state == "expected" for line in lines)
        new = sum(line.is_new for line in lines)
        before = [line.seen for line in lines if line.seen]
        cases = f"{len(self.ledgers)} case{'' if len(self.ledgers) == 1 else 's'}"
        parts = [f"{cases}: {expected} of {len(lines)} lines are the closed form's to the byte"]
        if explained := len(lines) - expected - new - len(before):
            parts.append(f"{explained} differ by a known pattern")
        if before:
            parts.append(f"{len(before)} are unexplained, as seen in {' and '.join(sorted(set(before)))}")
        if new:
            parts.append(f"{new} are unexplained and new")
        if incomplete := [ledger.case for ledger in self.ledgers if ledger.problems]:
            parts.append(f"incomplete: {', '.join(incomplete)}")
        if self.missing:
            parts.append(f"MISSING: {', '.join(self.missing)}")
        return ", ".join(parts)


def engine_ledger(case: str, record: Record) -> EngineLedger:
    """One record's ledger beside the closed form; of a peer nothing, which has ways of its own."""
    manifest = record.manifest
    if manifest.engine not in STUDIED:
        return EngineLedger(case=case, engine=manifest.engine, experiment=manifest.experiment)
    experiment = with_remat_resolved(manifest.engine, manifest.experiment)
    problems = list(record.ledger.problems)
    lines: list[Line] = []
    try:
        lines = line_up(manifest.engine, experiment, record.ledger.rows)
    except ValueError as error:
        problems.append(str(error))
    return EngineLedger(
        case=case,
        engine=manifest.engine,
        experiment=experiment,
        lines=lines,
        problems=problems,
    )


def read_ledgers(folder: Path) -> LedgerStudy:
    """Of every finished case of a run, from its records, and why another has none; nothing runs.

    Raises:
        RecordError: no such run, or its records are garbled.
    """
    outcome, records = read_run(folder)
    named = dict(zip(outcome.finished, records, strict=True))
    peers = {name: PEER for name, record in named.items() if record.manifest.engine not in STUDIED}
    versions = outcome.circumstances.versions
    return LedgerStudy(
        ledgers=[engine_ledger(name, record) for name, record in named.items() if name not in peers],
        missing=outcome.failures | dict.fromkeys(outcome.not_run, "it did not run"),
        left_out=outcome.left_out | peers,
        versions=", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions),
    )
