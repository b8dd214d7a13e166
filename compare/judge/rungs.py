"""Comparisons of two records, one for each rung of the ladder: the worst error, and where it is.

None means that there is nothing to compare: the runs did not leave it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from compare.checkpoint.description import WEIGHTS
from compare.contract.record import Record, read_tensors
from compare.contract.request import MOMENTS, UPDATES, Rung
from compare.judge.strategy import strategy_of
from compare.judge.tensor_errors import Found, relative_error, without_key_bias, worst_of, worst_tensor
from compare.numerics.data import SPLITS
from compare.numerics.optimizer import global_norm, moment_names, reference_step
from compare.numerics.parameters import fingerprint, initial_parameters, parameter_table
from compare.side.inputs import starting_sha256
from compare.spec.experiment import Experiment

MOST_SAID = 2
"""Objections in one verdict."""
Compare = Callable[[Record, Record], Found | None]


def shortened(run: Record, steps: int) -> Record:
    """The record with so many of its first steps; 0 for all."""
    return replace(run, steps=run.steps[:steps]) if steps else run


def dtypes_of(*runs: Record) -> set[str]:
    """The `precision.dtype` of each."""
    return {run.manifest.experiment.precision.dtype for run in runs}


def _compare_batch(reference: Record, candidate: Record) -> Found | None:
    if reference.manifest.corpus_sha256 != candidate.manifest.corpus_sha256:
        return math.inf, "the corpus is another one"
    return compare_tensors(reference, candidate, Rung.BATCH)


def _compare_initial_weights(reference: Record, candidate: Record) -> Found | None:
    """Against the reference's, and both against what they were to begin with: the seed's weights, which are
    bitwise the same everywhere, or those that were given."""
    apart = resumed_from_different_checkpoints(reference, candidate)
    if not apart:
        tensors = compare_tensors(reference, candidate, Rung.INITIAL_WEIGHTS)
        if tensors and tensors[0]:
            return tensors
        if candidate.manifest.initial_weights_sha256 != reference.manifest.initial_weights_sha256:
            return math.inf, "their fingerprint is another one"
    for run in (candidate, reference) if apart else (candidate,):
        request, experiment = run.request, run.manifest.experiment
        right = starting_sha256(request) if request else fingerprint(initial_parameters(experiment))
        if run.manifest.initial_weights_sha256 != right:
            given = bool(request and (request.init_from or request.resume))
            source = "were given" if given else "the seed gives"
            return math.inf, f"{run.manifest.engine} begins with other weights than {source}"
    return _compare_weights(reference, candidate, Rung.INITIAL_WEIGHTS) if apart else (0.0, "")


def resumed_from_different_checkpoints(reference: Record, candidate: Record) -> bool:
    """Whether each goes on from a checkpoint of its own."""
    runs = [run.request.resume for run in (reference, candidate) if run.request and run.request.resume]
    return len(runs) == 2 and runs[0].checkpoint != runs[1].checkpoint


def _compare_moments(reference: Record, candidate: Record) -> Found | None:
    rungs = UPDATES[0][1:]
    pairs = {MOMENTS[rung]: compare_tensors(reference, candidate, rung) for rung in rungs}
    found = [(pair[0], f"{name} of {pair[1]}") for name, pair in pairs.items() if pair]
    return max(found) if found else None


def compare_tensors(reference: Record, candidate: Record, rung: Rung, **how: Any) -> Found | None:
    """None for a rung that neither run left: `judge.acceptance` says if it was asked for."""
    expected, found = read_tensors(reference.folder, rung), read_tensors(candidate.folder, rung)
    return worst_tensor(found, expected, **how) if expected or found else None


def _compare_weights(reference: Record, candidate: Record, rung: Rung) -> Found | None:
    begin = None
    if dtypes_of(reference, candidate) != {"float64"}:
        begin = read_tensors(reference.folder, Rung.INITIAL_WEIGHTS) or None
    select = partial(without_key_bias, model=reference.manifest.experiment.model)
    return compare_tensors(reference, candidate, rung, select=select, since=begin)


def _compare_updates(reference: Record, candidate: Record) -> Found | None:
    """Each run's first updates against the definition of the optimizer, from its own gradients.

    Below float64 the weights of two correct runs part by as much as an update is large: Adam makes every
    gradient a step of about lr, also one whose sign is rounding. Given its own gradients an engine has no
    such excuse: it is held to the formulas of `compare.numerics.optimizer`, up to rounding of its weights.
    """
    return worst_of(
        (error, f"{whose}{place}, against the update of its own gradients,")
        for whose, run in (("", candidate), ("the reference's ", reference))
        for error, place in _updates(run)
    )


def _updates(run: Record) -> Iterator[Found]:
    """Errors of weights and moments after each update that is kept, from those before it.

    None where tensors are lacking: moments before the first update of a run that goes on from a checkpoint;
    in float16 all of such a run's, which does not say how many updates were skipped before.
    """
    request, experiment = run.request, run.manifest.experiment
    due = request.weights_due if request else {1: Rung.FIRST_WEIGHTS}
    updates = run.steps[0].step
    if updates and experiment.precision.dtype == "float16":
        return
    before = {WEIGHTS: read_tensors(run.folder, Rung.INITIAL_WEIGHTS)}
    for done, (step, rungs) in enumerate(zip(run.steps, UPDATES, strict=False), 1):
        gradients, *moments = (read_tensors(run.folder, rung) for rung in rungs)
        weights = read_tensors(run.folder, due[done]) if done in due else {}
        after = dict(zip((WEIGHTS, *moment_names(experiment.optimizer)), (weights, *moments), strict=False))
        if not step.skipped:
            if not updates or before.keys() == after.keys():
                number = step.step, updates
                for error, place in _errors_of_update(experiment, number, gradients, before, after):
                    yield error, f"{place} after step {step.step}"
            updates += 1
        for of in before.keys() & after.keys() if step.skipped else ():
            for name in before[of].keys() & after[of].keys():
                error = relative_error(after[of][name], before[of][name])
                yield error, f"{name} after step {step.step}, which was skipped"
        before = after


def _errors_of_update(
    experiment: Experiment,
    number: tuple[int, int],
    gradients: Mapping[str, np.ndarray],
    before: Mapping[str, Mapping[str, np.ndarray]],
    after: Mapping[str, Mapping[str, np.ndarray]],
) -> Iterator[Found]:
    """Of weights and moments after one update, one parameter after the other, in float64.

    Its `number` is that of the step, and of the updates before it. An error is relative to the largest entry
    before or after: two updates may cancel, and their rounding stays.
    """
    (step, updates), norm = number, global_norm(gradients)
    for parameter in parameter_table(experiment.model):
        name = parameter.name
        there = [gradients, *before.values(), *after.values()]
        if any(name not in tensors or tensors[name].shape != parameter.shape for tensors in there):
            continue  # what is missing or misshapen is told at the rung "request"
        gradient = {name: gradients[name].astype("float64")}
        moments = {of: {name: tensors[name].astype("float64")} for of, tensors in before.items()}
        weights = moments.pop(WEIGHTS)
        given = experiment.optimizer, (parameter,), weights, gradient, moments, step
        made, made_moments = reference_step(*given, updates=updates, norm=norm)
        for of, expected in {WEIGHTS: made, **made_moments}.items():
            begin = before[of][name] if of in before else np.zeros(parameter.shape)
            found, right = (np.stack([begin, tensors[name]]) for tensors in (after[of], expected))
            yield relative_error(found, right), name if of == WEIGHTS else f"{of} of {name}"


def _compare_norm(reference: Record, candidate: Record) -> Found:
    """The first norm against the reference's, and each run's norms against the gradients that it left."""
    worst = compare_steps(reference, candidate, "grad_norm", first=1)
    for whose, run in (("", candidate), ("the reference's ", reference)):
        for step, (rung, *_) in zip(run.steps, UPDATES, strict=False):
            gradients = read_tensors(run.folder, rung)
            if gradients and not step.skipped and math.isfinite(worst[0]):
                own = global_norm(gradients)
                error = abs(step.grad_norm - own) / own if own else abs(step.grad_norm)
                worst = max(worst, (error, f"step {step.step}, against the norm of {whose}own gradients"))
    return worst


def compare_steps(reference: Record, candidate: Record, field: str, *, first: int = 0) -> Found:
    """One figure of so many first steps, 0 for all: the worst error."""
    right, found = (shortened(run, first).steps for run in (reference, candidate))
    if len(right) != len(found):
        return math.inf, f"{len(found)} steps instead of {len(right)}"
    pairs = zip(right, found, strict=True)
    return _worst_number(
        (f"{field} of step {b.step}", getattr(a, field), getattr(b, field)) for a, b in pairs
    )


def _compare_evaluations(reference: Record, candidate: Record) -> Found | None:
    """Losses of both splits, after the same steps; None where neither run has any."""
    if not reference.evaluations and not candidate.evaluations:
        return None
    if [one.step for one in reference.evaluations] != [one.step for one in candidate.evaluations]:
        return math.inf, f"{len(candidate.evaluations)} evaluations instead of {len(reference.evaluations)}"
    return _worst_number(
        (f"{split} loss after step {found.step}", getattr(expected, split), getattr(found, split))
        for expected, found in zip(reference.evaluations, candidate.evaluations, strict=True)
        for split in SPLITS
    )


def _compare_strategies(reference: Record, candidate: Record) -> Found | None:
    """Each run against what was asked of it; None if neither's engine tells what it computes."""
    runs = {"": candidate, "the reference: ": reference}
    read = {whose: strategy_of(run) for whose, run in runs.items()}
    wrong = [f"{whose}{one}" for whose, strategy in read.items() for one in strategy.objections]
    if wrong:
        return math.inf, "; ".join(wrong[:MOST_SAID])
    if not any(strategy.findings for strategy in read.values()):
        return None
    untold = {what: why for strategy in read.values() for what, why in strategy.untold.items()}
    return 0.0, "; ".join(f"{what} was not compared ({why})" for what, why in untold.items())


def _compare_routing(reference: Record, candidate: Record) -> Found | None:
    """The share of the first step's choices that are others, and the first of them; None without experts.

    A token whose k-th and next router logit are nearly equal may go either way where sums are rounded: no
    mistake, but from there on the runs part. In float64 none is so near.
    """
    expected, found = (
        read_tensors(run.folder, Rung.ROUTING).get("experts") for run in (reference, candidate)
    )
    if expected is None or found is None or expected.shape != found.shape:
        return None if expected is found else (math.inf, "the experts of one run are not there")
    expected, found = (experts.swapaxes(0, 1) for experts in (expected, found))  # passes come one after other
    is_new, is_gone = (
        (a[..., :, None] != b[..., None, :]).all(-1) for a, b in ((found, expected), (expected, found))
    )
    if not is_new.any():
        return 0.0, ""
    first = tuple(np.argwhere(is_new.any(-1))[0])
    place = ", ".join(
        f"{what} {number}"
        for what, number in zip(("pass", "block", "sequence", "position"), first, strict=True)
    )
    experts = found[first][is_new[first]][0], expected[first][is_gone[first]][0]
    flips = f"{is_new.sum():,} of {is_new.size:,} choices, the first in {place}"
    return float(is_new.mean()), f"{flips}: expert {experts[0]} instead of {experts[1]}"


def _compare_tokens(reference: Record, candidate: Record) -> Found | None:
    """How many tokens each expert had in each step: the largest share of a block's choices that differs."""
    steps = zip(reference.steps, candidate.steps, strict=False)
    pairs = [(a.tokens_per_expert, b.tokens_per_expert, b.step) for a, b in steps]
    return worst_of(
        (float(np.abs(np.subtract(right, found)).sum() / 2 / sum(right)), f"block {block} in step {step}")
        for expected, got, step in pairs
        if expected and got
        for block, (right, found) in enumerate(zip(expected, got, strict=True))
    )


def _compare_loss_scales(reference: Record, candidate: Record) -> Found | None:
    """Which steps were skipped, and every scale; None where there is none."""
    if dtypes_of(reference, candidate) != {"float16"}:
        return None
    for expected, found in zip(reference.steps, candidate.steps, strict=False):
        if (expected.skipped, expected.loss_scale) != (found.skipped, found.loss_scale):
            steps = (found, expected)
            done = (f"{'skipped' if one.skipped else 'made'} at scale {one.loss_scale}" for one in steps)
            return math.inf, f"step {found.step} is {' instead of '.join(done)}"
    return 0.0, f"{sum(step.skipped for step in candidate.steps)} steps skipped"


def _worst_number(numbers: Iterable[tuple[str, float, float]]) -> Found:
    """The largest relative error of some numbers: where each is, what is right, and what was found."""
    errors = list[Found]()
    for where, expected, found in numbers:
        off = abs(found - expected) / abs(expected) if expected else abs(found)
        if not math.isfinite(off):
            return math.inf, f"{where} is {found} instead of {expected}"
        errors.append((off, where))
    return worst_of(errors) or (-1.0, "")


COMPARE: dict[str, Compare] = {
    "batch": _compare_batch,
    "initial_weights": _compare_initial_weights,
    "routing": _compare_routing,
    "loss": lambda *runs: compare_steps(*runs, "loss", first=1),
    "loss_scale": _compare_loss_scales,
    "gradients": lambda *runs: compare_tensors(*runs, Rung.GRADIENTS),
    "grad_norm": _compare_norm,
    "first_weights": lambda *runs: _compare_weights(*runs, Rung.FIRST_WEIGHTS),
    "first_moments": _compare_moments,
    "updates": _compare_updates,
    "later_weights": lambda *runs: _compare_weights(*runs, Rung.LATER_WEIGHTS),
    "final_weights": lambda *runs: _compare_weights(*runs, Rung.FINAL_WEIGHTS),
    "loss_curve": lambda *runs: compare_steps(*runs, "loss"),
    "norm_curve": lambda *runs: compare_steps(*runs, "grad_norm"),
    "tokens_per_expert": _compare_tokens,
    "evaluations": _compare_evaluations,
    "strategy": _compare_strategies,
}
"""Rungs after the request, in the order in which they are climbed."""
SOME = ("loss_scale", "final_weights", "evaluations", "strategy", "routing", "tokens_per_expert")
"""Rungs of some runs: in float16, of more steps than later_weights need, that evaluate, of our engines, with
experts."""
OF_FIRST_STEP = ("gradients", "grad_norm", "first_weights", "first_moments")
"""Rungs that say nothing where the first step was skipped."""
ABSENT = {
    "first_moments": "the optimizer keeps no moments",
    "updates": "what was before the update is not in the record, such as a checkpoint's moments",
}
"""Why runs of a whole ladder have nothing to compare at a rung."""
