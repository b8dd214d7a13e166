"""Check that the cases of a bench did the same work, with the ladder's tolerances.

A timed run leaves no tensors. Loss and gradient norm of every step, from the warm-up on, are compared with
the first case that trains the same experiment, in all rounds.
"""

import math
from collections.abc import Iterator

from compare.commands.bench.outcome import Measurement, TimedOutcome
from compare.judge.outcome import Case
from compare.judge.rungs import NAMED, limit_of_few_tokens
from compare.spec.experiment import Experiment, edited

FIGURES = {"loss": ("loss", "loss", "loss_curve"), "grad_norm": ("gradient norm", "grad_norm", "norm_curve")}
"""Figure -> its name, and the rungs whose tolerances the first and the later steps have."""


def find_disagreements(result: TimedOutcome) -> list[str]:
    """A line for each case whose losses or norms differ from the first case of the same training."""
    lines: dict[str, str] = {}
    for case, number, process, reference, expected in _pairs(result):
        difference = first_difference(process, expected, case.experiment)
        if difference and case.name not in lines:
            work = f"{case.name} did not do the same work as {reference.name}"
            lines[case.name] = f"{work}: in round {number} {difference}"
    return list(lines.values())


def first_difference(process: Measurement, expected: Measurement, experiment: Experiment) -> str:
    """The first step at which two processes differ by more than the tolerance; '' if they agree."""
    dtype = experiment.precision.dtype
    for figure, (name, of_first, of_later) in FIGURES.items():
        pairs = zip(process.curves[figure], expected.curves[figure], strict=True)
        for step, (found, right) in enumerate(pairs):
            rung = NAMED[of_later if step else of_first]
            limit = getattr(rung.limits, dtype)
            if rung.name == "norm_curve":
                limit = limit_of_few_tokens(limit, experiment, dtype)
            if step >= rung.first_steps.get(dtype, math.inf):
                break
            if not (error := _error(found, right)) <= limit:
                off = f"off by {error:.1e} (at most {limit:.0e})"
                return f"the {name} of step {step} is {found:.6g}, and not {right:.6g}: {off}"
    return ""


def summarize_agreement(result: TimedOutcome) -> str:
    """The largest differences of losses and norms, and the cases that were compared with nothing."""
    pairs = list(_pairs(result))
    compared = {one.name for case, _, _, first, _ in pairs if case != first for one in (case, first)}
    alone, sentences = [name for name in result.finished if name not in compared], []
    if compared:
        loss, norm = (
            max(max(map(_error, a.curves[figure], b.curves[figure])) for _, _, a, _, b in pairs)
            for figure in FIGURES
        )
        sentences.append(
            f"Loss and gradient norm of every step, warm-up included, were compared with the first case of "
            f"the same training: at most {loss:.0e} and {norm:.0e} apart."
        )
    if alone:
        others = "no other case trained the same experiment"
        sentences.append(f"The numbers of {', '.join(alone)} are unchecked: {others}.")
    return " ".join(sentences)


def _pairs(result: TimedOutcome) -> Iterator[tuple[Case, int, Measurement, Case, Measurement]]:
    """Every process but the first of its training, with its round, and that first one.

    The layout and `train.loss_chunks` do not change the numbers of a training.
    """
    first: dict[tuple, tuple[Case, Measurement]] = {}
    for case in result.cases.values():
        training = edited(case.experiment, {"train": {"loss_chunks": 1}})
        key = training.model, training.data, training.optimizer, training.train, training.precision
        for number, process in result.measurements.get(case.name, {}).items():
            reference, expected = first.setdefault(key, (case, process))
            if process is not expected:
                yield case, number, process, reference, expected


def _error(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected) if expected else abs(found)
