"""Acceptance of a record: it is held against its request before it is held against anything else.

Two runs that both did something else agree with each other: an engine that ignores its layout, a loop that
stops early, a recorder that leaves no tensors. So the request is the first rung of the ladder, and every run,
the reference too, must pass it.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET

from compare.checkpoint.description import CHECKPOINTS, WEIGHTS, checkpoints_in
from compare.checkpoint.reader import CheckpointError, CheckpointReader
from compare.contract.record import Record, Step, read_tensors
from compare.contract.request import Request, Rung, rungs_asked_for
from compare.numerics.data import open_corpus
from compare.numerics.loss_scale import next_scale
from compare.numerics.optimizer import learning_rate
from compare.numerics.parameters import parameter_count, parameter_table, storage_dtype
from compare.numerics.stream import Evaluation, keys_of_step, shape_of_routing, shapes_of_step, steps_due
from compare.spec.axes import parts_of
from compare.spec.experiment import Experiment


def objections(record: Record) -> list[str]:
    """Differences between a record and its request, in words. Raises RecordError: tensors are garbled."""
    request = record.request
    if request is None:
        return []
    return [
        *_of_manifest(record, request),
        *_of_steps(record.steps, request),
        *_of_evaluations(record.evaluations, request),
        *_of_ledger(record, request.experiment),
        *_of_tensors(record, request),
        *_of_checkpoint(record, request),
    ]


def differing_keys(found: Experiment, asked: Experiment) -> Iterator[str]:
    """`model.n_layer = 2 instead of 4` for every field in which two experiments differ."""
    wanted = msgspec.to_builtins(asked)
    for section, fields in msgspec.to_builtins(found).items():
        for key, value in fields.items():
            if value != wanted[section][key]:
                yield f"{section}.{key} = {value} instead of {wanted[section][key]}"


def _of_manifest(record: Record, request: Request) -> Iterator[str]:
    manifest, experiment = record.manifest, request.experiment
    devices = experiment.layout.devices
    expected = {
        "engine": request.engine,
        "platform": request.platform,
        "devices": devices,
        "parameters": parameter_count(experiment.model),
        "corpus_sha256": request.corpus_sha256 or manifest.corpus_sha256,
    }
    for key, value in expected.items():
        if (found := getattr(manifest, key)) != value:
            yield f"it ran with {key} = {found} instead of {value}"
    yield from (f"it ran {difference}" for difference in differing_keys(manifest.experiment, experiment))
    for kind, held in {"peak_memory_bytes": manifest.peak_memory_bytes, **manifest.resident_bytes}.items():
        if len(held) != devices:
            yield f"it says what {len(held)} devices hold ({kind}), and {devices} were asked for"
    figures = {f"step_time_ms of step {step.step}": step.step_time_ms for step in record.steps}
    figures |= {"first_step_s": manifest.first_step_s, "cpu_time_s": manifest.cpu_time_s}
    figures["peak_memory_bytes"] = min(manifest.peak_memory_bytes, default=0)
    impossible = [f"{name} was {value}" for name, value in figures.items() if not 0 < value < math.inf]
    yield from (f"it says that {figure}" for figure in impossible[:1])
    if len(record.steps) > 1 and all(step.instrumented for step in record.steps):
        yield "it says that all of its steps were watched"


def _of_steps(steps: list[Step], request: Request) -> Iterator[str]:
    first, asked, numbers = request.first_step, request.steps, [step.step for step in steps]
    experiment, scale = request.experiment, request.first_loss_scale
    if numbers != list(range(first, first + asked)):
        pairs = enumerate(numbers, first)
        odd = (f"number {found} comes where {right} belongs" for right, found in pairs if found != right)
        yield f"it has {len(numbers)} of {asked} steps: {next(odd, 'it ends there')}"
    for step in steps:
        for what, value in (("loss", step.loss), ("gradient norm", step.grad_norm)):
            if not math.isfinite(value):
                yield f"it diverged: the {what} of step {step.step} is {value}"
                return
        if step.lr != (right := learning_rate(experiment.optimizer, step.step)):
            yield f"the learning rate of step {step.step} is {step.lr:g} instead of {right:g}"
            return
        if step.loss_scale != (asked_scale := scale.scale if scale else UNSET):
            yield f"the loss scale of step {step.step} is {step.loss_scale} instead of {asked_scale}"
            return
        model, counts = experiment.model, step.tokens_per_expert
        choices = experiment.tokens_per_step * model.experts_per_token
        asked_counts = [(model.n_experts, choices)] * model.n_layer if model.n_experts else UNSET
        if (found := [(len(layer), sum(layer)) for layer in counts] if counts else UNSET) != asked_counts:
            yield f"step {step.step} has (experts, tokens) by block as {found} instead of {asked_counts}"
            return
        if scale:
            try:
                scale = next_scale(scale, experiment.precision, overflowed=step.skipped)
            except OverflowError as error:
                yield f"it went on after step {step.step}, whose {error}"
                return
        elif step.skipped:
            yield f"step {step.step} was skipped, and {experiment.precision.dtype} has no reason to"
            return


def _of_evaluations(evaluations: list[Evaluation], request: Request) -> Iterator[str]:
    asked, found = steps_due(request.experiment, request.first_step), [one.step for one in evaluations]
    if found != asked:
        yield f"it evaluated after {len(found)} steps instead of {len(asked)}"
    for one in evaluations:
        if not (math.isfinite(one.train) and math.isfinite(one.validation)):
            yield f"it diverged: the validation loss after step {one.step} is {one.validation}"
            return


def _of_ledger(record: Record, experiment: Experiment) -> Iterator[str]:
    """Nothing can be split over an axis along which nothing is ever sent."""
    used = {axis for row in record.ledger.rows if row.calls for axis in parts_of(row.axis)}
    split = {axis for axis, degree in experiment.layout.axes.items() if degree > 1}
    for axis in sorted(split - used):
        yield f"nothing was communicated along {axis}, over which the layout spreads it"
    if odd := sorted(used - split):
        has_more = f"which has a degree of 1 ({', '.join(sorted(split))} have more)"
        yield f"it communicated along {', '.join(odd)}, {has_more if split else 'on one device'}"


def _of_tensors(record: Record, request: Request) -> Iterator[str]:
    experiment, kept = request.experiment, storage_dtype(request.experiment)
    table = {parameter.name: (parameter.shape, kept) for parameter in parameter_table(experiment.model)}
    of_routing = {"experts": (shape_of_routing(experiment), np.dtype("int32"))}
    of_tokens = {Rung.BATCH: shapes_of_step(experiment), Rung.ROUTING: of_routing}
    for rung in rungs_asked_for(request):
        tensors = read_tensors(record.folder, rung)
        if not tensors:
            yield f"it left no {rung}"
            continue
        expected = of_tokens.get(rung, table)
        left = {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in tensors.items()}
        asked = {name: f"{dtype} {shape}" for name, (shape, dtype) in expected.items()}
        if odd := next((name for name in sorted(left | asked) if left.get(name) != asked.get(name)), ""):
            have, belongs = left.get(odd, "nothing"), asked.get(odd, "nothing")
            yield f"its {rung} have {odd} as {have} instead of {belongs}"
        if rung == Rung.BATCH:
            yield from _of_batch(tensors, request)
        elif rung == Rung.ROUTING:
            counts = [np.bincount(layer.ravel()).tolist() for layer in tensors["experts"]]
            told = [np.trim_zeros(layer, "b") for layer in record.steps[0].tokens_per_expert or ()]
            if counts != told:
                yield f"its experts of step {request.first_step} have other tokens than its tokens_per_expert"
        if rung == Rung.GRADIENTS and not any(tensor.any() for tensor in tensors.values()):
            yield f"every gradient of step {request.first_step} is zero"


def _of_batch(left: Mapping[str, np.ndarray], request: Request) -> Iterator[str]:
    """The first batch against the corpus, where that is still there; its dropout keys against the seed."""
    experiment, step = request.experiment, request.first_step
    for name, drawn in keys_of_step(experiment, step).items():
        if name in left and not np.array_equal(left[name], drawn):
            yield f"its dropout keys are not those of step {step} and train.seed"
    source = experiment.data.source
    if not request.corpus_sha256 or not (source == "synthetic" or Path(source).exists()):
        return
    corpus = open_corpus(experiment, validated_sha256=request.corpus_sha256)
    drawn = dict(zip(("inputs", "targets"), corpus.batch(experiment, step), strict=True))
    if all(name in left and np.array_equal(left[name], tokens) for name, tokens in drawn.items()):
        return
    if open_corpus(experiment).sha256 != request.corpus_sha256:
        yield f"{source} has changed since"
    else:
        yield f"its batch is not that of step {step} of {source}"


def _of_checkpoint(record: Record, request: Request) -> Iterator[str]:
    """What is saved after the last step is what the run ended with. Checkpoints may be moved away later."""
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
        yield f"what it saved after step {steps} cannot be read: {error}"
        return
    if odd:
        yield f"it saved another {odd} after step {steps} than it had"
