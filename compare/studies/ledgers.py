"""The ledgers of engines under layouts, lined up with the textbook of each."""

from pathlib import Path

from msgspec import Struct, field

from compare.contract.record import Record
from compare.judge.ledger import Flow, line_up, mismatches, recorded_rows, snapshot_rows
from compare.judge.outcome import read_run
from compare.judge.strategy import asked_of, with_remat_resolved
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment

PEER = "a peer has ways of its own: there is no closed form of what it sends"


class EngineLedger(Struct, frozen=True, kw_only=True):
    """What one engine communicates under one layout, beside the textbook."""

    case: str
    engine: str
    experiment: Experiment
    """As it was run, with `layout.remat` resolved."""
    flows: list[Flow] = field(default_factory=list)
    is_recorded: bool = False
    """Whether the snapshot has this engine, layout and version: then it is held to those bytes."""
    unexpected: list[str] = field(default_factory=list)
    """What could not be read, is not the layout's, or is not what was recorded."""


class LedgerStudy(Struct, frozen=True, kw_only=True):
    """The ledgers of a run's cases, and the cases that have none."""

    ledgers: list[EngineLedger]
    missing: dict[str, str] = field(default_factory=dict)
    """What became of a case that should have one and has none, by its name."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why others are no case, or have no closed form, by name."""

    @property
    def passed(self) -> bool:
        """True if no case is missing, and each has passed."""
        return not self.missing and not any(ledger.unexpected for ledger in self.ledgers)

    def sentence(self) -> str:
        """How far from the textbook the cases are, and how many are as they were recorded."""
        ratios = [flow.ratio for ledger in self.ledgers for flow in ledger.flows if flow.ratio is not None]
        exact = sum(flow.sent == flow.textbook for ledger in self.ledgers for flow in ledger.flows)
        far = f", the others {min(ratios):.2f} to {max(ratios):.2f} times" if exact < len(ratios) else ""
        recorded = sum(ledger.is_recorded for ledger in self.ledgers)
        unexpected = ", ".join(ledger.case for ledger in self.ledgers if ledger.unexpected)
        parts = {
            f"{len(self.ledgers)} case{'s' * (len(self.ledgers) != 1)}": True,
            f"{exact} of {len(ratios)} flows are the textbook's to the byte{far}": ratios,
            f"{recorded} are held to recorded bytes": recorded,
            f"UNEXPECTED: {unexpected}": unexpected,
            f"MISSING: {', '.join(self.missing)}": self.missing,
        }
        return "; ".join(part for part, is_said in parts.items() if is_said)


def engine_ledger(case: str, record: Record) -> EngineLedger:
    """One record's ledger beside textbook and snapshot; of a peer nothing, which has ways of its own."""
    manifest, rows = record.manifest, record.ledger.rows
    engine = manifest.engine
    if engine not in STUDIED:
        return EngineLedger(case=case, engine=engine, experiment=manifest.experiment)
    experiment = with_remat_resolved(engine, manifest.experiment)
    recorded = recorded_rows(engine, asked_of(record), manifest.versions)
    flows = line_up(engine, experiment, rows)
    unexpected = [f"incomplete: {problem}" for problem in record.ledger.problems]
    unexpected += mismatches(engine, experiment, flows)
    if recorded and (sent := snapshot_rows(rows)) != recorded:
        odd = [f"sent {row}" for row in sent if row not in recorded]
        odd += [f"recorded {row}" for row in recorded if row not in sent]
        unexpected.append(f"not as recorded: {', '.join(odd)}")
    return EngineLedger(
        case=case,
        engine=engine,
        experiment=experiment,
        flows=flows,
        is_recorded=bool(recorded),
        unexpected=unexpected,
    )


def read_ledgers(folder: Path) -> LedgerStudy:
    """Of every finished case of a run, from its records, and why another has none; nothing runs.

    Raises RecordError.
    """
    outcome, records = read_run(folder)
    named = dict(zip(outcome.finished, records, strict=True))
    peers = {name: PEER for name, record in named.items() if record.manifest.engine not in STUDIED}
    return LedgerStudy(
        ledgers=[engine_ledger(name, record) for name, record in named.items() if name not in peers],
        missing=outcome.undone,
        left_out=outcome.left_out | peers,
    )
