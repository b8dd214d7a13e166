"""The studies: a class each, by the word of its command. A new one is named here, and nowhere else."""

from pathlib import Path
from typing import Any

from compare.commands.bench import Bench
from compare.commands.check import Check
from compare.commands.faults import Faults
from compare.commands.ledger import Ledger
from compare.commands.memory import Memory
from compare.commands.profile import Profile
from compare.commands.run import Resume, Run
from compare.commands.sweep import Sweep
from compare.judge.outcome import OUTCOME, Outcome, read_outcome
from compare.system.tensors import RecordError

STUDIES: dict[str, Any] = {
    study.__name__.lower(): study
    for study in (Run, Resume, Sweep, Check, Faults, Bench, Profile, Ledger, Memory)
}


def read_study(folder: Path) -> tuple[Any, Outcome]:
    """What a study left in a folder, and which it was. Raises RecordError."""
    outcome = read_outcome(folder)
    if outcome.study not in STUDIES:
        raise RecordError(f"{folder / OUTCOME}: this version has no study {outcome.study}")
    return STUDIES[outcome.study], outcome
