"""Records made by hand: what an engine would leave, without running one."""

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from compare.contract.communication import GRADIENTS, Communication, ring_wire_bytes
from compare.contract.ledger import Ledger
from compare.contract.record import Manifest, Record, Recorder, Step, read_record, write_tensors
from compare.contract.request import REQUEST, UPDATES, Request, ResumePoint, Rung, rungs_asked_for
from compare.contract.work import Kept, ObservedWork, Part
from compare.execute.this_machine import git_state
from compare.judge.alone import judged
from compare.judge.outcome import Case, Circumstances, Outcome, save, with_case
from compare.judge.rungs import NAMED
from compare.judge.strategy import blocks_that_run
from compare.judge.strategy_gradients import leaves_of
from compare.judge.verdict import Verdict, climb
from compare.numerics.data import open_corpus
from compare.numerics.optimizer import global_norm, learning_rate, reference_step
from compare.numerics.parameters import (
    fingerprint,
    initial_parameters,
    parameter_count,
    parameter_table,
    storage_dtype,
)
from compare.numerics.stream import Evaluation, keys_of_step, shape_of_routing, steps_due
from compare.pipeline.schedules import make_schedule
from compare.run.metrics import figures
from compare.spec.axes import REPLICAS, joined_of
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment
from compare.system.json_files import write_json
from compare.theory.communication import bytes_sent
from compare.theory.memory import bytes_at_rest
from compare.theory.ring import HOP, orders_of_ring

CORPUS = "00"
OF_EXPERTS = ("routing", "later_routing", "tokens_per_expert")
CLIMBED = [rung for rung in NAMED if rung not in ("loss_scale", "evaluations", *OF_EXPERTS)]
"""The rungs of a run of three steps or more, in float64, that evaluates nothing and has one MLP a block."""
FEW_ROWS = [
    Communication(kind="all_reduce", axis="dp_replicate", calls=2, bytes=4000, wire_bytes=6000),
    Communication(kind="all_reduce", axis="dp_replicate", calls=1, bytes=4, wire_bytes=6, purpose="loss"),
]
"""A ledger of round numbers."""


MADE = Circumstances(
    created_utc="2026-01-01T00:00:00+00:00",
    system="Linux x86_64",
    cpu_model="a CPU",
    cores=2,
    git_commit="0123456789abcdef",
)


def outcome_of(experiment: Experiment, **given: Any) -> Outcome:
    """An outcome of this experiment; other fields are empty."""
    commit, dirty = git_state()
    nothing: dict[str, Any] = {
        "study": "run",
        "name": "test",
        "circumstances": Circumstances(git_commit=commit, git_dirty=dirty),
    }
    return Outcome(experiment=experiment, **nothing | given)


def finished_of(experiment: Experiment, costs: dict[str, Any], **given: Any) -> Outcome:
    """An outcome whose cases have finished at these costs."""
    cases = {name: Case(request=make_request(experiment)) for name in costs}
    return outcome_of(
        experiment, cases=cases, kept={name: {1: cost} for name, cost in costs.items()}, **given
    )


def tensors_of(experiment: Experiment) -> dict[Rung, dict[str, np.ndarray]]:
    """Plausible tensors for every rung, the same at every call."""
    weights, train = initial_parameters(experiment), experiment.train
    random = np.random.default_rng(0)
    noise = {name: random.normal(size=tensor.shape).astype(tensor.dtype) for name, tensor in weights.items()}
    shape_ABT = (train.gradient_accumulation_steps, train.batch_size, experiment.model.block_size)
    inputs_ABT = np.arange(np.prod(shape_ABT), dtype=np.int32).reshape(shape_ABT)
    targets_ABT = inputs_ABT + 1
    if experiment.data.source == "synthetic":
        inputs_ABT, targets_ABT = open_corpus(experiment).batch(experiment, 0)
    half = {name: tensor / 2 for name, tensor in noise.items()}
    updated, made = _updated(experiment, weights, noise, {}, 0)
    later, made_later = _updated(experiment, updated, half, made, 1)
    tensors = {
        Rung.BATCH: {"inputs": inputs_ABT, "targets": targets_ABT, **keys_of_step(experiment, 0)},
        Rung.INITIAL_WEIGHTS: weights,
        Rung.GRADIENTS: noise,
        Rung.FIRST_WEIGHTS: updated,
        Rung.SECOND_GRADIENTS: half,
        Rung.LATER_WEIGHTS: {name: weights[name] - noise[name] for name in weights},
        Rung.FINAL_WEIGHTS: {name: weights[name] + noise[name] for name in weights},
    }
    if k := experiment.model.experts_per_token if experiment.model.n_experts else 0:
        shape = shape_of_routing(experiment)
        tokens = np.arange(np.prod(shape[:-1]), dtype=np.int32).reshape(*shape[:-1], 1)
        chosen = (tokens + np.arange(k, dtype=np.int32)) % experiment.model.n_experts
        tensors[Rung.ROUTING] = {"experts": np.sort(chosen)}
    for (_, *rungs), moments in zip(UPDATES, (made, made_later), strict=True):
        tensors |= dict(zip(rungs, moments.values(), strict=False))
    request = make_request(experiment)
    tensors |= {rung: later for step, rung in request.weights_due.items() if step == 2}
    return {rung: values for rung, values in tensors.items() if rung in rungs_asked_for(request)}


def _updated(experiment: Experiment, weights, gradients, moments, step: int) -> tuple[dict, dict]:
    """Weights and moments after a step, as they are stored."""
    table, dtype = parameter_table(experiment.model), storage_dtype(experiment)
    after, made = reference_step(experiment.optimizer, table, weights, gradients, moments, step)
    stored = [{name: x.astype(dtype) for name, x in of.items()} for of in (after, *made.values())]
    return stored[0], dict(zip(made, stored[1:], strict=True))


def make_steps(experiment: Experiment) -> list[Step]:
    """A falling loss, and at first the norm of the gradients in `tensors_of`."""
    tensors, tokens = tensors_of(experiment), {}
    norm = global_norm(tensors[Rung.GRADIENTS])
    if Rung.ROUTING in tensors:
        counts = [np.bincount(layer.ravel()).tolist() for layer in tensors[Rung.ROUTING]["experts"]]
        tokens = {"tokens_per_expert": counts}
    return [
        Step(
            step=index,
            loss=5.5 / (1 + index),
            grad_norm=norm / (1 + index),
            lr=learning_rate(experiment.optimizer, index),
            step_time_ms=10.0 + index,
            instrumented=index == 1,
            **tokens,
        )
        for index in range(experiment.train.max_iters)
    ]


def make_record(
    folder: Path,
    experiment: Experiment,
    *,
    engine: str = "torch-manual",
    tensors: dict[Rung, dict[str, np.ndarray]] | None = None,
    steps: list[Step] | None = None,
    ladder: bool = True,
    resume: ResumePoint | UnsetType = UNSET,
) -> Record:
    """Write a complete record with its request, and read it."""
    folder.mkdir(parents=True)
    request = replace(make_request(experiment, engine=engine, ladder=ladder), resume=resume)
    write_json(folder / REQUEST, request)
    recorder = Recorder(folder)
    for rung, values in (tensors if tensors is not None else tensors_of(experiment)).items():
        write_tensors(recorder.folder, rung, values)
    for step in steps if steps is not None else make_steps(experiment):
        recorder.step(step)
    devices, at_rest = experiment.layout.devices, bytes_at_rest(engine, experiment)
    manifest = Manifest(
        engine=engine,
        experiment=experiment,
        platform="cpu",
        devices=devices,
        device_kind="a CPU",
        parameters=parameter_count(experiment.model),
        initial_weights_sha256=fingerprint(initial_parameters(experiment)),
        corpus_sha256=CORPUS,
        versions={"python": "3"},
        threads="one",
        compile_s=0.0,
        first_step_s=0.1,
        cpu_time_s=1.0,
        peak_memory_bytes=[2000] * devices,
        peak_memory_method="by hand",
        resident_bytes={kind: [round(size) for size in sizes] for kind, sizes in at_rest.items()},
    )
    for step in steps_due(experiment):
        recorder.evaluation(Evaluation(step=step, train=5.5, validation=5.5))
    if not ENGINES[engine].is_peer:
        recorder.leave(make_work(engine, experiment))
    recorder.leave(Ledger(rows=make_ledger(engine, experiment)))
    recorder.finish(manifest)
    return read_record(folder)


def make_work(engine: str, experiment: Experiment) -> ObservedWork:
    """Observed work of a step that obeys its layout."""
    layout, chunks = experiment.layout, experiment.train.loss_chunks
    blocks = 1 if ENGINES[engine].is_peer else blocks_that_run(ENGINES[engine], experiment)
    logits = chunks * max(blocks // experiment.model.n_layer, 1)
    forward: dict[Part, int] = {"products": 5 * blocks, "activations": blocks, "logits": logits}
    parts = {"none": (), "dots": ("activations",), "full": ("activations", "products")}
    again = {part: forward[part] for part in parts[ENGINES[engine].remat_for(layout)]}
    schedule = make_schedule(
        layout.schedule, ranks=layout.pp, microbatches=experiment.microbatches_per_step, chunks=layout.chunks
    )
    early = layout.gradient_sync in ("overlapped", "bucketed") and layout.schedule != "zero_bubble"
    stages = range(layout.pp) if layout.replicas > 1 and not layout.zero else ()
    messages = [reduces(engine, experiment, stage) for stage in stages]
    is_ring = layout.cp > 1 and layout.context == "ring"
    return ObservedWork(
        rings=sorted(orders_of_ring(layout)) if is_ring and not ENGINES[engine].is_jax else [HOP] * is_ring,
        products={experiment.precision.product_dtype: 12},
        forward=forward,
        again=again | ({"logits": logits} if chunks > 1 else {}),
        logits_positions=[
            experiment.model.block_size // chunks // (1 if ENGINES[engine].sent_by_xla else layout.cp)
        ],
        tasks=[[str(task) for task in rank] for rank in schedule] if layout.pp > 1 else [],
        gradient_messages=[[(size, early) for size in sizes] for sizes in messages]
        if ENGINES[engine].counts_own_calls
        else [],
        kept={what: [storage_dtype(experiment).name] for what in get_args(Kept)},
    )


def make_ledger(engine: str, experiment: Experiment) -> list[Communication]:
    """Messages of a step that sends the closed form, and the loss."""
    layout, rows = experiment.layout, []
    for stage in range(layout.pp):
        for (kind, axis, purpose), size in bytes_sent(engine, experiment, stage=stage).items():
            replicas = joined_of(REPLICAS, layout.axes)
            of_replicas = (kind, axis, purpose) == ("all_reduce", replicas, GRADIENTS)
            degree = math.prod(layout.axes[name] for name in axis.split("+"))
            calls = len(reduces(engine, experiment, stage)) if of_replicas else 1
            rows.append(
                Communication(
                    kind=kind,
                    axis=axis,
                    purpose=purpose,
                    calls=calls,
                    bytes=round(size),
                    wire_bytes=ring_wire_bytes(kind, round(size), degree),
                    stage=stage,
                )
            )
    rows += [
        Communication(kind="all_reduce", axis=axis, calls=1, bytes=4, wire_bytes=6, purpose="loss")
        for axis, degree in layout.axes.items()
        if degree > 1
    ]
    return rows


def reduces(engine: str, experiment: Experiment, stage: int) -> list[int]:
    """Bytes of the all-reduces of gradients: each alone, all at once, or in buckets."""
    layout, is_jax = experiment.layout, ENGINES[engine].side == "jaxpar"
    limits = {"naive": 0.0, "overlapped": 0.0, "flat": math.inf}
    limit, sizes = limits.get(layout.gradient_sync, layout.bucket_mb * 1e6), list[int]()
    leaves = [*map(round, leaves_of(ENGINES[engine], experiment, stage))]
    alone = [leaf for leaf in leaves if is_jax and leaf >= limit / 4]
    for leaf in reversed([leaf for leaf in leaves if not is_jax or leaf < limit / 4]):
        if not sizes or sizes[-1] + leaf > limit:
            sizes.append(0)
        sizes[-1] += leaf
    return [*alone, *sizes]


def climbed(reference: Record, candidate: Record, **how: Any) -> Verdict:
    """The verdict of two records, each judged alone before."""
    return climb(judged(reference), judged(candidate), **how)


def make_request(experiment: Experiment, *, engine: str = "torch-manual", ladder: bool = True) -> Request:
    later = min(20, max(experiment.train.max_iters - 1, 1))
    return Request(
        engine=engine, experiment=experiment, ladder=ladder, later_step=later, corpus_sha256=CORPUS
    )


def make_run(
    folder, experiment, *, names=("torch-manual", "jax-manual"), missing=(), steps=None, tensors=None, **given
) -> Outcome:
    """Engines' records and the outcome of their run, saved; `steps` and `tensors` are the last one's."""
    records = {}
    for name in names:
        own = {"steps": steps, "tensors": tensors} if name == names[-1] else {}
        records[name] = make_record(folder / name, experiment, engine=name, **own)
    requests = {name: record.request for name, record in records.items()}
    requests |= {name: make_request(experiment, engine=name) for name in missing}
    first = names[0] if names else missing[0]
    planned: dict[str, Any] = {
        "name": "<script>alert(1)</script>",
        "circumstances": MADE,
        "keeps_records": True,
        "cases": {
            name: Case(request=request, against="" if name == first else first)
            for name, request in requests.items()
        },
        "failures": {name: "<b>no</b> luck [/x]" for name in missing[:1]},
    }
    outcome = outcome_of(experiment, **planned | given)
    for name, record in records.items():
        outcome = with_case(outcome, name, figures(record), record, folder)
    save(outcome, folder)
    return outcome
