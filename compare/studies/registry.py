"""The studies: a class each, by the word of its command. A new one is named here, and nowhere else."""

from pathlib import Path

from compare.host.tensors import RecordError
from compare.judge.comparison import Comparison
from compare.judge.outcome import OUTCOME, Outcome, read_outcome
from compare.studies.accumulation import Accumulation
from compare.studies.bench import Bench
from compare.studies.buckets import Buckets
from compare.studies.check import Check
from compare.studies.counts import Counts
from compare.studies.faults import Faults
from compare.studies.golden import Golden
from compare.studies.matrix import Matrix
from compare.studies.memory import Memory
from compare.studies.moves import Moves
from compare.studies.precisions import Precisions
from compare.studies.recipes import Recipes
from compare.studies.resume import Resume
from compare.studies.run import Run
from compare.studies.savings import Savings
from compare.study import Study

STUDIES: dict[str, type[Study]] = {
    study.word(): study
    for study in (
        Run,
        Resume,
        Recipes,
        Check,
        Matrix,
        Golden,
        Faults,
        Moves,
        Precisions,
        Counts,
        Bench,
        Buckets,
        Accumulation,
        Memory,
        Savings,
    )
}
AS_RUN = ("profile", "ledger", "sweep")
"""Commands whose comparisons are shown as a run is."""


def read_study(folder: Path) -> tuple[type[Study], Outcome]:
    """What a study left in a folder, and which it was.

    Raises:
        RecordError: there is none, it is garbled, or of a study that this version has not.
    """
    word = read_outcome(folder, Outcome).study
    if word in AS_RUN:
        return Run, read_outcome(folder, Comparison)
    if word not in STUDIES:
        raise RecordError(f"{folder / OUTCOME}: this version has no study {word}")
    return STUDIES[word], read_outcome(folder, STUDIES[word].kept)
