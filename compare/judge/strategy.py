"""The rung "strategy" of the ladder: a run's observed work beside its request.

Numbers do not depend on how work is spread, ordered and kept: an engine that ignores a setting of its layout
computes the same. So each setting is read off what was observed, and held against what was asked (`READ`):
dtypes of products, of messages and of what 16 bits leave as it is, and the bits of gradients; who compiled;
blocks, recomputation and logits by counts of operations; the order of a pipeline's tasks; all-reduces of
gradients, their bytes, and which begin within backward; weights of replicas; bytes at rest and bytes that are
sent, against closed forms. What an engine cannot tell, and what has no closed form, is named in
`Strategy.untold`, never passed over.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np

from compare.contract.communication import GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS
from compare.contract.record import Record, read_tensors
from compare.contract.request import Rung
from compare.contract.work import Kept, ObservedWork
from compare.judge.ledger import unlike_textbook
from compare.numerics.parameters import storage_dtype
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import lock_step
from compare.spec.axes import PP, REPLICAS, joined_of
from compare.spec.engines.engine import Engine
from compare.spec.engines.registry import ENGINES, JAX
from compare.spec.experiment import Experiment
from compare.theory.gradient_messages import gradient_messages
from compare.theory.memory import closed_form, excess

AT_REST = 0.05
"""Of a kind's bytes at rest: beyond shards that cannot all be equal, which the closed form has."""
OF_HLO = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""XLA's names of dtypes."""


class Finding(NamedTuple):
    """One setting by its name in the experiment: what was asked, and what was done."""

    setting: str
    asked: str
    found: str


class Strategy(NamedTuple):
    """Every setting that could be read off a record, and what could not, with the reason."""

    findings: Sequence[Finding] = ()
    untold: Mapping[str, str] = {}

    @property
    def objections(self) -> list[str]:
        """Settings that were not obeyed, each in a few words."""
        odd = (finding for finding in self.findings if finding.found != finding.asked)
        return [f"{one.setting} = {one.asked} was asked for, and {one.found} was done" for one in odd]

    def found(self, setting: str) -> str:
        """Observed value of one setting; '' if it is untold."""
        return next((finding.found for finding in self.findings if finding.setting == setting), "")


class Observed(NamedTuple):
    """A run, its work as it was observed, and the experiment that was asked for."""

    record: Record
    work: ObservedWork
    engine: Engine
    experiment: Experiment


def strategy_of(record: Record) -> Strategy:
    """Read the settings off what a run left; nothing of a peer, which does not tell what it computes."""
    engine = ENGINES.get(record.manifest.engine)
    if engine is None or engine.is_peer:
        return Strategy(untold={"strategy": f"{record.manifest.engine} does not tell what it computes"})
    if record.work is None:
        return Strategy(findings=[Finding("work.json", "what a step computed", "nothing")])
    run = Observed(record, record.work, engine, asked_of(record))
    findings, untold = list[Finding](), dict[str, str]()
    for setting, read in READ.items():
        try:
            findings += read(run)
        except ValueError as error:  # no closed form
            untold[setting] = str(error)
    return Strategy(findings, untold)


def asked_of(record: Record) -> Experiment:
    """The experiment that was asked for: the request's, where there is one."""
    return record.request.experiment if record.request else record.manifest.experiment


def _compile(run: Observed) -> Iterator[Finding]:
    """Only of an engine that may compile or not, where it is told which."""
    asked, found = run.experiment.layout.compile, run.work.compiled.partition(",")[0] or "none"
    if run.engine.sends_by == "dtensor" and asked != "auto":
        yield Finding("layout.compile", asked, found)


def _dtype(run: Observed) -> Iterator[Finding]:
    asked = run.experiment.precision.product_dtype
    if asked == "tf32" and run.record.manifest.platform == "cpu":
        asked = "float32"  # tf32 is a permission, which a CPU has no use for
    yield Finding("precision.dtype", asked, ", ".join(sorted(run.work.products)) or "none")
    if run.engine.sends_by == "xla":
        return  # sends in what dtype it likes
    stored, sent = storage_dtype(run.experiment).name, dict[str, set[str]]()
    for row in run.record.ledger.rows:
        is_of_gradients = row.purpose in (GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS)
        is_of_stream = (row.kind, row.axis) == ("permute", PP)
        what = "gradients" if is_of_gradients else "streams" if is_of_stream else ""
        if what and row.dtype:
            sent.setdefault(what, set()).update(OF_HLO.get(dtype, dtype) for dtype in row.dtype.split(", "))
    for what, dtypes in sent.items():
        yield Finding(f"dtype of {what} that are sent", stored, ", ".join(sorted(dtypes)))


def _kept(run: Observed) -> Iterator[Finding]:
    if run.work.compiled:
        raise ValueError(f"operators of a compiled program ({run.work.compiled})")
    stored = storage_dtype(run.experiment).name
    for what in get_args(Kept):
        found = run.work.kept.get(what, [])
        if found or what not in ("softmax", "router"):
            yield Finding(f"dtype of the {what}", stored, ", ".join(found) or "none")


def _gradients(run: Observed) -> Iterator[Finding]:
    """Whether float32 has added them up, where products have 16 bits.

    LayerNorms and positions get theirs from float32: a sum of them needs all 24 bits. Were its terms, or the
    sums on the way, rounded to 8 or 11 bits, it would seldom need more than 16.
    """
    gradients, layout = read_tensors(run.record.folder, Rung.GRADIENTS), run.experiment.layout
    terms = run.experiment.microbatches_per_step * layout.data_parallel * layout.cp
    names = [name for name in ("embedding.position", "norm.scale") if name in gradients]
    if not names or run.experiment.precision.dtype not in ("bfloat16", "float16"):
        return
    sums = np.concatenate([gradients[name].reshape(-1) for name in names])
    sums = sums[np.isfinite(sums) & (sums != 0)] * np.float32(terms)
    if sums.size:
        needs_few = sums.view(np.uint32) % 256 == 0
        found = "16 bits" if needs_few.mean() > 0.5 else "float32"
        yield Finding("dtype in which gradients are added up", "float32", found)


def blocks_that_run(engine: Engine, experiment: Experiment) -> int:
    """How many blocks forward runs in a step: on all ranks, or in the one program that JAX traces."""
    layout, turns = experiment.layout, experiment.microbatches_per_step
    blocks = experiment.model.n_layer // layout.pp
    if engine.side != JAX.name:
        return layout.devices * turns * blocks
    if layout.pp > 1:  # a stage at every tick, idle or not
        schedule = make_schedule(layout.schedule, ranks=layout.pp, microbatches=turns, chunks=layout.chunks)
        by_autodiff = turns * layout.chunks + layout.pp - 1
        turns = by_autodiff if engine.sent_by_xla else len(lock_step(schedule).tasks.kind)
    return turns * blocks // layout.chunks


def _remat(run: Observed) -> Iterator[Finding]:
    forward, again = Counter(run.work.forward), Counter(run.work.again)
    blocks = forward["activations"]
    yield Finding("blocks that forward runs", str(blocks_that_run(run.engine, run.experiment)), str(blocks))
    found = ", ".join(f"{again[part]} of {forward[part]} {part}" for part in ("products", "activations"))
    if again["activations"] >= blocks and not again["products"]:
        found = "dots"
    elif again["activations"] >= blocks and again["products"] >= forward["products"] - blocks:
        found = "full"  # of a block's last product backward has no use
    elif not again["activations"] and not again["products"]:
        found = "none"
    yield Finding("layout.remat", run.engine.remat_for(run.experiment.layout), found)


def _loss_chunks(run: Observed) -> Iterator[Finding]:
    chunks, layout = run.experiment.train.loss_chunks, run.experiment.layout
    sees_own = run.engine.sends_by != "xla"  # positions of a device, not of all of them
    length = run.experiment.model.block_size / (layout.cp if sees_own else 1)
    found = ", ".join(f"{length / positions:g}" for positions in run.work.logits_positions if positions)
    parts = run.work.forward.get("logits", 0)
    passes = blocks_that_run(run.engine, run.experiment) // run.experiment.model.n_layer
    if layout.pp == 1 and parts != chunks * passes:
        found += f", and {parts / passes:g} products for them in a pass,"
    if chunks > 1 and run.work.again.get("logits", 0) < parts:
        found += ", whose logits are kept for backward,"
    yield Finding("train.loss_chunks", str(chunks), found or "none")


def _schedule(run: Observed) -> Iterator[Finding]:
    layout, found = run.experiment.layout, "another order"
    if layout.pp == 1:
        return
    if not run.work.tasks:
        raise ValueError("XLA orders the tasks of a pipeline that autodiff has made")
    sizes = {"microbatches": run.experiment.microbatches_per_step, "chunks": layout.chunks}
    for name in (*run.engine.layouts.schedules, layout.schedule):  # of two that are alike, the one asked for
        tasks = make_schedule(name, ranks=layout.pp, **sizes)
        found = name if [[str(task) for task in rank] for rank in tasks] == run.work.tasks else found
    yield Finding("layout.schedule", layout.schedule, found)


def _gradient_sync(run: Observed) -> Iterator[Finding]:
    """Only where the layout's choice is carried out: not by FSDP, which reduces unit by unit."""
    layout, engine, seen = run.experiment.layout, run.engine, run.work.gradient_messages
    asked = layout.gradient_sync if engine.offers_choice else engine.gradient_sync[0]
    expected = {
        sync: gradient_messages(engine.name, run.experiment, gradient_sync=sync)
        for sync in dict.fromkeys((asked, *engine.gradient_sync))
    }
    if expected[asked] is None:
        return
    calls, replicas = [0] * layout.pp, joined_of(REPLICAS, layout.axes)
    for row in run.record.ledger.rows:
        if (row.kind, row.axis, row.purpose) == ("all_reduce", replicas, GRADIENTS):
            calls[row.stage] += row.calls
    sizes = [[size for size, _ in of_stage] for of_stage in seen]
    early = {begun for of_stage in seen for _, begun in of_stage}
    has_buckets, counted = asked == "bucketed" or not engine.offers_choice, "/".join(map(str, calls))
    words = f"{asked} of {layout.bucket_mb:g} MB" if has_buckets else asked
    when = "partly within" if len(early) > 1 else "within" if True in early else "after"
    found = f"{counted} all-reduces" + (f" {when} backward" if seen else "")
    for sync, messages in expected.items():
        if not messages or [*map(len, messages.by_stage)] != calls or (seen and early != {messages.overlap}):
            continue
        if not seen or sizes == messages.by_stage:
            found = words if sync == asked else f"{sync} ({counted} calls)"
            break
        found += ", with other parameters in each"
    yield Finding("layout.gradient_sync", words, found)


def _at_rest(run: Observed) -> Iterator[Finding]:
    layout, manifest, replicas = run.experiment.layout, run.record.manifest, "the same on all devices"
    yield Finding("weights of replicas at the end", replicas, manifest.replicas_apart or replicas)
    asked = f"zero {layout.zero}, offload {layout.offload}"
    expected, most = (closed_form(run.engine.name, run.experiment, rounds_up=up) for up in (False, True))
    if all(step.skipped for step in run.record.steps):
        del expected["optimizer"]  # PyTorch makes the moments when it updates
    errors = {kind: excess(manifest.resident_bytes, {kind: size}, most) for kind, size in expected.items()}
    odd = [f"{kind} off by {error:+.0%}" for kind, error in errors.items() if not abs(error) <= AT_REST]
    yield Finding("bytes at rest", asked, ", ".join(odd) or asked)


def _sent(run: Observed) -> Iterator[Finding]:
    ledger, engine = run.record.ledger, run.engine.name
    if ledger.problems:
        yield Finding("the ledger", "complete", ledger.problems[0])
    asked = "the textbook of the layout"
    watched = next((step for step in run.record.steps if step.instrumented), run.record.steps[-1])
    odd = unlike_textbook(
        engine,
        run.experiment,
        ledger.rows,
        is_compiled=bool(run.work.compiled),
        tokens_LE=watched.tokens_per_expert or (),
    )
    yield Finding("what is sent", asked, next(odd, asked))


READ: Mapping[str, Callable[[Observed], Iterator[Finding]]] = {
    "layout.compile": _compile,
    "precision.dtype": _dtype,
    "dtypes beside the products": _kept,
    "sums of gradients": _gradients,
    "layout.remat": _remat,
    "train.loss_chunks": _loss_chunks,
    "layout.schedule": _schedule,
    "layout.gradient_sync": _gradient_sync,
    "bytes at rest": _at_rest,
    "what is sent": _sent,
}
"""What reads each setting."""


def done_words(record: Record) -> dict[str, str]:
    """A run's settings for the tables, by key of METRICS: as observed, else as its engine declares."""
    engine, strategy = ENGINES.get(record.manifest.engine), strategy_of(record)
    declared = engine.gradient_sync_for(asked_of(record).layout) if engine else ""
    return {
        "gradient_sync": strategy.found("layout.gradient_sync").split(" of ")[0] or declared,
        "remat": strategy.found("layout.remat") or "untold",
        "compiled": record.work.compiled if record.work else "",
    }
