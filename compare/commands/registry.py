"""All studies, by the word of their command. Add a new study here."""

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
    """The class of the study in a folder, and its outcome. Raises RecordError."""
    outcome = read_outcome(folder)
    if outcome.study not in STUDIES:
        raise RecordError(f"{folder / OUTCOME}: no study {outcome.study}: use the version that wrote it")
    return STUDIES[outcome.study], outcome
