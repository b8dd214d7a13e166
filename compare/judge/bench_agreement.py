"""Whether the cases of a bench did the same work: what its figures are worth.

A timed run leaves no tensors, so what is held is the loss and the gradient norm of every step of every
process, from the first step of the warm-up on: cases of one training against the first of them. Of the first
step the ladder's own limits hold. While weights have hardly moved, rounding has not grown either, and limits
are sharper than those of the ladder's curves, which are for thousands of steps. Later steps are held by
their median: where training has a spike, single ones of correct engines part, in 16 bits by anything.
"""

import itertools
import math
import statistics
from collections.abc import Iterator

from compare.judge.outcome import Case
from compare.judge.timed_outcome import Measurement, TimedOutcome
from compare.judge.tolerances import tolerances_for
from compare.numerics.optimizer import learning_rate
from compare.spec.experiment import Experiment, edited

MOVED_LITTLE = 5e-3
"""The sum of learning rates up to which steps are early: AdamW moves a weight by about the rate at a step."""
LIMITS = {  # behind them the worst measured of all pairs of engines on one device, under DDP, FSDP and tp
    ("float64", "loss"): (1e-10, 1e-10),
    ("float64", "grad_norm"): (1e-10, 1e-10),
    ("float32", "loss"): (3e-6, 1e-5),  # 5e-7 and 1e-6; with float16's products 3e-6
    ("float32", "grad_norm"): (1e-5, 1e-3),  # 5e-7 and 3e-5; with float16's products 3e-5
    ("bfloat16", "loss"): (1e-3, 5e-3),  # 3e-4 and 1e-3
    ("bfloat16", "grad_norm"): (1e-2, 0.5),  # 2e-3 and 8e-2
    ("float16", "loss"): (1e-4, 5e-4),  # 2e-5 and 1e-4
    ("float16", "grad_norm"): (2e-3, 5e-2),  # 4e-4 and 6e-3
}
"""The largest relative difference of an early step, and the largest median of those of later steps."""
NO_SPIKES = {("float64", "loss"), ("float64", "grad_norm"), ("float32", "loss")}
"""Where single later steps are held, too: elsewhere those of correct engines part by 1e-2 to 2."""
CURVES = {"loss": ("loss", "loss", "loss_curve"), "grad_norm": ("gradient norm", "grad_norm", "norm_curve")}
"""What is held, in words, with the ladder's rung of the first step and that of all steps."""


def disagreements(result: TimedOutcome) -> list[str]:
    """Cases whose losses and norms are not those of the first case of their training: they did other work."""
    lines: dict[str, str] = {}
    for case, process, reference, expected in _pairs(result):
        parting = _first_parting(process, expected, case.experiment)
        if parting and case.name not in lines:
            work = f"{case.name} did not do the same work as {reference.name}"
            lines[case.name] = f"{work}: in round {process.round} {parting}"
    return list(lines.values())


def _first_parting(process: Measurement, expected: Measurement, experiment: Experiment) -> str:
    """Where two processes part by more than correct engines of their training do; '' if they do not."""
    dtype = experiment.precision.dtype
    for figure, (name, *_) in CURVES.items():
        pairs = list(zip(process.curves[figure], expected.curves[figure], strict=True))
        errors = [_error(*pair) for pair in pairs]
        early, limits = _limits(experiment, figure, len(errors))
        for step, (error, limit) in enumerate(zip(errors, limits, strict=True)):
            if not error <= limit:
                number, right = pairs[step]
                off = f"off by {error:.1e} (at most {limit:.0e})"
                return f"the {name} of step {step} is {number:.6g}, and not {right:.6g}: {off}"
        most = LIMITS[dtype, figure][1]
        if (middle := statistics.median(errors[early:] or [0.0])) > most:
            off = f"off by {middle:.1e} in the median (at most {most:.0e})"
            return f"from step {early} on the {name} is {off}"
    return ""


def _limits(experiment: Experiment, figure: str, steps: int) -> tuple[int, list[float]]:
    """How many steps are early, and the largest relative difference at each step."""
    dtype = experiment.precision.dtype
    first, curve = (tolerances_for(dtype)[rung].limit for rung in CURVES[figure][1:])
    moved = itertools.accumulate(learning_rate(experiment.optimizer, step) for step in range(steps))
    early = 1 + sum(before <= MOVED_LITTLE for before in list(moved)[:-1])
    late = curve if (dtype, figure) in NO_SPIKES else math.inf
    limits = [min(LIMITS[dtype, figure][0], curve) if step < early else late for step in range(1, steps)]
    return early, [first, *limits]


def agreement_summary(result: TimedOutcome) -> str:
    """How far apart losses and norms are at most, and which cases had nothing to be held against."""
    pairs = list(_pairs(result))
    compared = {
        name for case, _, reference, _ in pairs if case != reference for name in (case.name, reference.name)
    }
    alone = [
        case.name for case in result.cases.values() if result.rounds_of(case) and case.name not in compared
    ]
    said = []
    if compared:
        loss, norm = (
            max(max(map(_error, a.curves[figure], b.curves[figure])) for _, a, _, b in pairs)
            for figure in CURVES
        )
        said.append(
            f"Loss and gradient norm of every step, warm-up included, are held against the first case of the "
            f"same training: at most {loss:.0e} and {norm:.0e} apart."
        )
    if alone:
        said.append(f"Nothing else trained the same as {', '.join(alone)}: no number of it is held.")
    return " ".join(said)


def _pairs(result: TimedOutcome) -> Iterator[tuple[Case, Measurement, Case, Measurement]]:
    """Every process but the first of its training, and that first one.

    All of an experiment decides the numbers but its layout, and how many logits exist at once.
    """
    first: dict[tuple, tuple[Case, Measurement]] = {}
    for case in result.cases.values():
        training = edited(case.experiment, {"train": {"loss_chunks": 1}})
        key = training.model, training.data, training.optimizer, training.train, training.precision
        for process in result.rounds_of(case).values():
            reference, expected = first.setdefault(key, (case, process))
            if process is not expected:
                yield case, process, reference, expected


def _error(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected) if expected else abs(found)
