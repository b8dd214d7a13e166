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

from compare.commands.bench.outcome import Measurement, TimedOutcome
from compare.judge.outcome import Case
from compare.judge.tolerances import tolerances_for
from compare.numerics.optimizer import learning_rate
from compare.spec.experiment import Experiment, edited

MOVED_LITTLE = 5e-3
"""The sum of learning rates up to which steps are early: AdamW moves a weight by about the rate at a step."""
LIMITS = {  # behind them the worst measured of all pairs of engines on one device, under DDP, FSDP and tp
    ("float64", "loss"): (1e-10, 1e-10, 1e-10),
    ("float64", "grad_norm"): (1e-10, 1e-10, 1e-10),
    ("float32", "loss"): (3e-6, 1e-5, 1e-3),  # 5e-7 and 1e-6; with float16's products 3e-6
    ("float32", "grad_norm"): (1e-5, 1e-3, math.inf),  # 5e-7 and 3e-5; with float16's products 3e-5
    ("bfloat16", "loss"): (1e-3, 5e-3, math.inf),  # 3e-4 and 1e-3
    ("bfloat16", "grad_norm"): (1e-2, 0.5, math.inf),  # 2e-3 and 8e-2
    ("float16", "loss"): (1e-4, 5e-4, math.inf),  # 2e-5 and 1e-4
    ("float16", "grad_norm"): (2e-3, 5e-2, math.inf),  # 4e-4 and 6e-3
}
"""The largest relative difference of an early step, the largest median of those of later steps, and the
largest of one of these: in spikes those of correct engines part by 1e-2 to 2."""
FIGURES = {"loss": "loss", "grad_norm": "gradient norm"}
"""What is held, in words."""


def disagreements(result: TimedOutcome) -> list[str]:
    """Cases whose losses and norms are not those of the first case of their training: they did other work."""
    lines: dict[str, str] = {}
    for case, number, process, reference, expected in _pairs(result):
        parting = _first_parting(process, expected, case.experiment)
        if parting and case.name not in lines:
            work = f"{case.name} did not do the same work as {reference.name}"
            lines[case.name] = f"{work}: in round {number} {parting}"
    return list(lines.values())


def _first_parting(process: Measurement, expected: Measurement, experiment: Experiment) -> str:
    """Where two processes part by more than correct engines of their training do; '' if they do not."""
    dtype = experiment.precision.dtype
    for figure, name in FIGURES.items():
        of_early, of_median, of_late = LIMITS[dtype, figure]
        pairs = list(zip(process.curves[figure], expected.curves[figure], strict=True))
        errors = [_error(*pair) for pair in pairs]
        rates = (learning_rate(experiment.optimizer, step) for step in range(len(errors) - 1))
        early = 1 + sum(moved <= MOVED_LITTLE for moved in itertools.accumulate(rates))
        of_first = tolerances_for(dtype)[figure].limit
        for step, (error, (number, right)) in enumerate(zip(errors, pairs, strict=True)):
            limit = of_first if not step else of_early if step < early else of_late
            if not error <= limit:
                off = f"off by {error:.1e} (at most {limit:.0e})"
                return f"the {name} of step {step} is {number:.6g}, and not {right:.6g}: {off}"
        if (middle := statistics.median(errors[early:] or [0.0])) > of_median:
            off = f"off by {middle:.1e} in the median (at most {of_median:.0e})"
            return f"from step {early} on the {name} is {off}"
    return ""


def agreement_summary(result: TimedOutcome) -> str:
    """How far apart losses and norms are at most, and which cases had nothing to be held against."""
    pairs = list(_pairs(result))
    held = {one.name for case, _, _, first, _ in pairs if case != first for one in (case, first)}
    alone, said = [name for name in result.finished if name not in held], []
    if held:
        loss, norm = (
            max(max(map(_error, a.curves[figure], b.curves[figure])) for _, _, a, _, b in pairs)
            for figure in FIGURES
        )
        said.append(
            f"Loss and gradient norm of every step, warm-up included, are held against the first case of the "
            f"same training: at most {loss:.0e} and {norm:.0e} apart."
        )
    if alone:
        said.append(f"Nothing else trained the same as {', '.join(alone)}: no number of it is held.")
    return " ".join(said)


def _pairs(result: TimedOutcome) -> Iterator[tuple[Case, int, Measurement, Case, Measurement]]:
    """Every process but the first of its training, with its round, and that first one.

    All of an experiment decides the numbers but its layout, and how many logits exist at once.
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
