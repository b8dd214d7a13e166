"""Verdicts of runs whose ladder tensors were removed once they had passed.

What needs no tensor is judged anew: losses, norms of every step, evaluations, the strategy. The rungs of
tensors are those that were judged while the tensors were there.
"""

from msgspec.structs import replace

from compare.contract.record import Record
from compare.judge.ladder import LADDER, OF_FIRST_STEP, Verdict

OF_TENSORS = ("batch", "initial_weights", *OF_FIRST_STEP, "later_weights", "final_weights")
"""Rungs that are kept."""


def without_ladder(record: Record) -> Record:
    """The record as one that was not asked for tensors, so that it is not held to have them."""
    return replace(record, request=replace(record.request, ladder=False)) if record.request else record


def with_kept_rungs(anew: Verdict, saved: Verdict) -> Verdict:
    """The verdict on what can still be judged, with the saved one's rungs of tensors.

    Args:
        anew: of records without their tensors.
        saved: of the same case, while they were there.
    """
    rungs = [result for result in anew.rungs if result.rung not in OF_TENSORS]
    rungs += [result for result in saved.rungs if result.rung in OF_TENSORS]
    rungs.sort(key=lambda result: LADDER.index(result.rung))
    kept = {rung: why for rung, why in saved.skipped.items() if rung in OF_TENSORS}
    judged = {rung: why for rung, why in anew.skipped.items() if rung not in OF_TENSORS}
    return replace(anew, rungs=rungs, skipped=kept | judged)
