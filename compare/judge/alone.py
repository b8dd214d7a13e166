"""The judgement of one record: against its request, the seed, and the optimizer's formulas.

Two runs with the same mistake agree with each other, such as two that ignore their layout. So each record is
judged alone, once, when it is read. `outcome.json` keeps the result.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from compare.checkpoint.description import CHECKPOINTS, WEIGHTS, checkpoints_in
from compare.checkpoint.reader import CheckpointError, CheckpointReader
from compare.contract.record import Record, file_sums, read_tensors
from compare.contract.request import UPDATES, Request, rungs_asked_for
from compare.contract.request import Rung as Recorded
from compare.judge.errors import Found, relative_error
from compare.judge.strategy import settings_of, strategy_of
from compare.numerics.data import open_corpus
from compare.numerics.optimizer import global_norm, moment_names, reference_step
from compare.numerics.parameters import SeedWeights, fingerprint, parameter_table, storage_dtype
from compare.numerics.stream import keys_of_step, shape_of_routing, shapes_of_step, steps_due
from compare.side.inputs import starting_sha256
from compare.spec.axes import parts_of
from compare.spec.experiment import Experiment

REQUEST, INITIAL_WEIGHTS, NORMS = "request", "initial_weights", "grad_norm"
UPDATE, STRATEGY = "updates", "strategy"
"""Rungs that a run can fail alone."""
OWN_GRADIENTS = " (against its own gradients)"
"""End of a place whose expected value comes from gradients in the record."""
LISTED = 2
"""Objections in one verdict."""


class Alone(Struct, frozen=True, kw_only=True):
    """Judgement of one record."""

    request: list[str] = []
    """Differences between the record and its request."""
    strategy: dict[str, str] = {}
    """Settings of the layout that were not obeyed: what was asked for, and what was done."""
    uncompared: dict[str, str] = {}
    """Settings that were not checked, with the reason."""
    settings: dict[str, str] = {}
    """Settings as observed, by key of `METRICS`."""
    own: dict[str, Found] = {}
    """The largest error of the rungs that need no second run, and its place."""
    sums: dict[str, str] = {}
    """SHA-256 of each file that was judged (`file_sums`); {} in a study of an older version."""

    @property
    def objections(self) -> list[str]:
        """All differences between the run and its request."""
        return [*self.request, *self.strategy.values()]


class Judged(NamedTuple):
    """A record with its name in a study, and its judgement."""

    name: str
    record: Record
    alone: Alone


def judged(record: Record, name: str = "") -> Judged:
    """Judge a record alone. Its name is its engine by default.

    Raises RecordError: a file of tensors cannot be read.
    """
    request, strategy = objections(record), strategy_of(record)
    own = {REQUEST: _as_error(request)}
    if not (record.request and record.request.timing):
        own[INITIAL_WEIGHTS] = _as_error(_check_start(record))
    for rung, errors in ((NORMS, _compare_norms(record)), (UPDATE, _compare_updates(record))):
        if found := max(errors, key=lambda one: one[0], default=None):
            own[rung] = found
    if strategy.findings:
        own[STRATEGY] = _as_error(strategy.objections.values())
    alone = Alone(
        request=request,
        strategy=strategy.objections,
        uncompared={**strategy.uncompared, **_uncompared_update(record)},
        settings=settings_of(record, strategy),
        own=own,
        sums=file_sums(record.folder) if record.request else {},
    )
    return Judged(name or record.manifest.engine, record, alone)


def _as_error(wrong: Iterable[str]) -> Found:
    """An infinite error with the first objections; 0 without objections."""
    lines = list(wrong)
    return (math.inf, "; ".join(lines[:LISTED])) if lines else (0.0, "")


# Against the request


def objections(record: Record) -> list[str]:
    """Differences between a record and its request. Raises RecordError: tensors cannot be read."""
    if record.request is None:
        return []
    return [
        *_check_steps(record, record.request.experiment),
        *_check_ledger(record, record.request.experiment),
        *_check_tensors(record, record.request),
        *_check_checkpoint(record, record.request),
    ]


def _check_steps(record: Record, experiment: Experiment) -> Iterator[str]:
    """Values that are not finite, other evaluations, and tokens that experts lost or counted twice."""
    values = {
        f"{what} of step {s.step}": x
        for s in record.steps
        for what, x in (("loss", s.loss), ("gradient norm", s.grad_norm))
    }
    values |= {f"validation loss after step {e.step}": e.validation for e in record.evaluations}
    diverged = [f"it diverged: the {what} is {x}" for what, x in values.items() if not math.isfinite(x)]
    yield from diverged[:1]
    evaluated = [evaluation.step for evaluation in record.evaluations]
    if evaluated != (due := steps_due(experiment, record.steps[0].step)):
        yield f"it has {len(evaluated)} evaluations, and not those after {len(due)} steps that were asked for"
    model = experiment.model
    if not model.n_experts:
        return
    asked = [(model.n_experts, experiment.tokens_per_step * model.experts_per_token)] * model.n_layer
    for step in record.steps:
        found = [(len(layer), sum(layer)) for layer in step.tokens_per_expert or ()]
        if found != asked:
            yield f"step {step.step} has (experts, tokens) by block as {found} instead of {asked}"
            return


def _check_ledger(record: Record, experiment: Experiment) -> Iterator[str]:
    """Axes that nothing was sent along, so nothing is split over them; and axes of one device."""
    used = {axis for row in record.ledger.rows if row.calls for axis in parts_of(row.axis)}
    split = {axis for axis, degree in experiment.layout.axes.items() if degree > 1}
    for axis in sorted(split - used):
        yield f"nothing was sent along {axis}, over which the layout splits the work"
    if odd := sorted(used - split):
        yield f"it sent along {', '.join(odd)}, where the layout has one device"


def _check_tensors(record: Record, request: Request) -> Iterator[str]:
    experiment, kept = request.experiment, storage_dtype(request.experiment)
    table = {parameter.name: (parameter.shape, kept) for parameter in parameter_table(experiment.model)}
    of_tokens = {
        Recorded.BATCH: shapes_of_step(experiment),
        Recorded.ROUTING: {"experts": (shape_of_routing(experiment), np.dtype("int32"))},
    }
    for rung in rungs_asked_for(request):
        tensors = read_tensors(record.folder, rung)
        if not tensors:
            yield f"it recorded no {rung}"
            continue
        found = {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in tensors.items()}
        asked = {name: f"{dtype} {shape}" for name, (shape, dtype) in of_tokens.get(rung, table).items()}
        if odd := next((name for name in sorted(found | asked) if found.get(name) != asked.get(name)), ""):
            have, belongs = found.get(odd, "missing"), asked.get(odd, "unknown")
            yield f"its {rung} have {odd} as {have} instead of {belongs}"
        elif rung == Recorded.BATCH:
            yield from _check_batch(tensors, request)
        elif rung == Recorded.ROUTING:
            counts = [np.bincount(layer.ravel()).tolist() for layer in tensors["experts"]]
            if counts != [np.trim_zeros(layer, "b") for layer in record.steps[0].tokens_per_expert or ()]:
                yield f"its routing and its tokens_per_expert differ in step {request.first_step}"
        elif rung == Recorded.GRADIENTS and not any(tensor.any() for tensor in tensors.values()):
            yield f"every gradient of step {request.first_step} is zero"


def _check_batch(found: Mapping[str, np.ndarray], request: Request) -> Iterator[str]:
    """The first batch against the corpus, if it can still be read; the dropout keys against the seed."""
    experiment, step = request.experiment, request.first_step
    for name, drawn in keys_of_step(experiment, step).items():
        if not np.array_equal(found[name], drawn):
            yield f"its dropout keys are not the keys of step {step} and train.seed"
    source = experiment.data.source
    if not request.corpus_sha256 or not (source == "synthetic" or Path(source).exists()):
        return
    corpus = open_corpus(experiment, validated_sha256=request.corpus_sha256)
    drawn = zip(("inputs", "targets"), corpus.batch(experiment, step), strict=True)
    if all(np.array_equal(found[name], tokens) for name, tokens in drawn):
        return
    is_other = open_corpus(experiment).sha256 != request.corpus_sha256
    yield f"{source} has changed since" if is_other else f"its batch is not batch {step} of {source}"


def _check_checkpoint(record: Record, request: Request) -> Iterator[str]:
    """The last checkpoint against the last weights. A user may move checkpoints away after the run."""
    kept, steps = checkpoints_in(record.folder / CHECKPOINTS), request.experiment.train.max_iters
    rung = request.weights_due.get(request.steps)
    if not kept or rung is None:
        return
    if steps not in kept:
        yield f"it saved no checkpoint after its last step, {steps}"
        return
    try:
        saved, held = CheckpointReader(kept[steps]).group(WEIGHTS), read_tensors(record.folder, rung)
        odd = next((name for name in held if not np.array_equal(saved[name], held[name])), "")
    except CheckpointError as error:
        yield f"its checkpoint after step {steps} cannot be read: {error}"
        return
    if odd:
        yield f"its checkpoint after step {steps} has another {odd} than it ended with"


# Against the seed and the formulas


def _check_start(record: Record) -> Iterator[str]:
    """The first weights against the seed's, which are bitwise equal everywhere, or the given weights."""
    request = record.request
    drawn = SeedWeights(record.manifest.experiment)
    right = starting_sha256(request) if request else fingerprint(drawn)
    if record.manifest.initial_weights_sha256 != right:
        given = request and (request.init_from or request.resume)
        yield f"it begins with other weights than {'were given' if given else 'the seed gives'}"


def _compare_norms(record: Record) -> Iterator[Found]:
    """The norms of the first steps against the gradients in the record."""
    for step, (rung, *_) in zip(record.steps, UPDATES, strict=False):
        if (gradients := read_tensors(record.folder, rung)) and not step.skipped:
            norm = global_norm(gradients)
            error = abs(step.grad_norm - norm) / (norm or 1.0)
            yield error, f"grad_norm of step {step.step}{OWN_GRADIENTS}"


def _compare_updates(record: Record) -> Iterator[Found]:
    """The first updates against the optimizer's formulas, from the run's own gradients.

    Below float64 the weights of two correct runs may differ by a whole update. Adam turns every gradient into
    a step of about lr, even if rounding decides its sign. But from its own gradients an engine must compute
    the formulas of `compare.numerics.optimizer` up to rounding.

    The moments before the first update of a resumed run are those of its checkpoint. Nothing is compared
    where tensors are missing.
    """
    request, experiment = record.request, record.manifest.experiment
    due = request.weights_due if request else {1: Recorded.FIRST_WEIGHTS}
    before: dict[str, Mapping[str, np.ndarray]] = {
        WEIGHTS: read_tensors(record.folder, Recorded.INITIAL_WEIGHTS)
    }
    updates = record.steps[0].step
    if checkpoint := _resumed_checkpoint(record):
        updates = checkpoint.description.updates
        moments = moment_names(experiment.optimizer)
        before |= {name: checkpoint.group(name) for name in moments if updates}
    elif updates and experiment.precision.dtype == "float16":
        return  # the number of skipped updates is unknown
    for done, (step, rungs) in enumerate(zip(record.steps, UPDATES, strict=False), 1):
        gradients, *moments = (read_tensors(record.folder, rung) for rung in rungs)
        weights = read_tensors(record.folder, due[done]) if done in due else {}
        after = dict(zip((WEIGHTS, *moment_names(experiment.optimizer)), (weights, *moments), strict=False))
        errors = ()
        if step.skipped:
            errors = (  # nothing may move
                (relative_error(after[group][name], before[group][name]), name)
                for group in before.keys() & after.keys()
                for name in before[group].keys() & after[group].keys()
            )
        elif not updates or before.keys() == after.keys():
            errors = _errors_of_update(experiment, step.step, updates, gradients, before, after)
        for error, place in errors:
            yield error, f"{place} after step {step.step}{OWN_GRADIENTS}"
        updates += not step.skipped
        before = after


def _resumed_checkpoint(record: Record) -> CheckpointReader | None:
    """The checkpoint from which a run resumed; None for another run, or if the checkpoint is gone."""
    resume = record.request.resume if record.request else None
    if not resume:
        return None
    try:
        checkpoint = CheckpointReader(Path(resume.checkpoint))
    except CheckpointError:
        return None
    there, here = checkpoint.description.experiment.optimizer, record.manifest.experiment.optimizer
    return checkpoint if moment_names(there) == moment_names(here) else None


def _uncompared_update(record: Record) -> dict[str, str]:
    """The first update of a resumed run, if it cannot be compared, with the reason."""
    request = record.request
    if not request or not request.resume or not request.ladder or not request.resume.step:
        return {}
    if _resumed_checkpoint(record):
        return {}
    return {"the first update": f"its checkpoint {request.resume.checkpoint} cannot be read any more"}


State = Mapping[str, Mapping[str, np.ndarray]]
"""Weights and moments: by group, then by canonical name."""


def _errors_of_update(
    experiment: Experiment,
    step: int,
    updates: int,
    gradients: Mapping[str, np.ndarray],
    before: State,
    after: State,
) -> Iterator[Found]:
    """Weights and moments after one update, parameter by parameter, in float64.

    An error is relative to the largest entry before or after: if an update cancels, its rounding stays.
    """
    norm = global_norm(gradients)
    for parameter in parameter_table(experiment.model):
        name = parameter.name
        there = [gradients, *before.values(), *after.values()]
        if any(name not in tensors or tensors[name].shape != parameter.shape for tensors in there):
            continue  # the rung "request" fails
        gradient = {name: gradients[name].astype("float64")}
        moments = {group: {name: tensors[name].astype("float64")} for group, tensors in before.items()}
        weights = moments.pop(WEIGHTS)
        given = experiment.optimizer, (parameter,), weights, gradient, moments, step
        made, made_moments = reference_step(*given, updates=updates, norm=norm)
        for group, expected in {WEIGHTS: made, **made_moments}.items():
            begin = before[group][name] if group in before else np.zeros(parameter.shape)
            found, right = (np.stack([begin, tensors[name]]) for tensors in (after[group], expected))
            yield relative_error(found, right), name if group == WEIGHTS else f"{group} of {name}"
