"""The studies: a class each, by the word of its command. A new one is named here, and nowhere else."""

from pathlib import Path
from typing import Any

from compare.host.tensors import RecordError
from compare.judge.outcome import OUTCOME, Outcome, read_outcome
from compare.studies.bench import Bench
from compare.studies.check import Check
from compare.studies.collectives import Collectives
from compare.studies.faults import Faults
from compare.studies.ledger import Ledger
from compare.studies.memory import Memory
from compare.studies.plan import Plan
from compare.studies.profile import Profile
from compare.studies.run import Resume, Run
from compare.studies.sweep import Sweep

STUDIES: dict[str, Any] = {
    study.__name__.lower(): study
    for study in (Run, Resume, Sweep, Check, Faults, Bench, Profile, Ledger, Collectives, Memory, Plan)
}


def read_study(folder: Path) -> tuple[Any, Outcome]:
    """What a study left in a folder, and which it was. Raises RecordError."""
    outcome = read_outcome(folder)
    if outcome.study not in STUDIES:
        raise RecordError(f"{folder / OUTCOME}: this version has no study {outcome.study}")
    return STUDIES[outcome.study], outcome
