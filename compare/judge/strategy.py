"""The rung "strategy": a run's observed work, compared with the layout that was requested.

The numbers of training do not depend on how work is split, ordered and stored. An engine that ignores a
setting of its layout computes the same. So each setting is read off what was observed in the program (`READ`)
and compared with the request. A setting that an engine does not show, or that has no closed form, is listed
in `Strategy.uncompared`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from compare.contract.record import Record
from compare.judge.observed import Finding, Observed
from compare.judge.strategy_dtypes import read_dtypes, read_gradient_sums, read_kept_dtypes
from compare.judge.strategy_gradients import read_gradient_sync
from compare.judge.textbook import unlike_textbook, without_limit
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import lock_step
from compare.spec.attention import core_in_jax, is_ring, positions_of_block
from compare.spec.engines.engine import Engine
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment
from compare.spec.xla import xla_options
from compare.theory.memory import bytes_at_rest, excess
from compare.theory.ring import HOP, orders_of_ring

AT_REST = 0.05
"""Tolerance of bytes at rest: scalars such as Adam's step, beyond padding."""
OF_KERNEL = re.compile(r"(cudnn|flash|efficient)")
"""The kind of a fused kernel in its name."""
SENT, LEDGER = "bytes sent", "the ledger"


class Strategy(NamedTuple):
    """Settings that were read off a record, and settings that were not, with the reason."""

    findings: Sequence[Finding] = ()
    uncompared: Mapping[str, str] = {}

    @property
    def objections(self) -> dict[str, str]:
        """Settings that were not obeyed, by name."""
        return {
            one.setting: f"{one.setting} = {one.asked} was asked for; found: {one.found}"
            if one.asked
            else f"{one.setting}: {one.found}"
            for one in self.findings
            if one.found != one.asked
        }

    def found(self, setting: str) -> str:
        """Observed value of a setting; "" if it was not observed."""
        return next((finding.found for finding in self.findings if finding.setting == setting), "")


def strategy_of(record: Record) -> Strategy:
    """Read the settings off a record. Peers show nothing of what they compute."""
    engine = ENGINES.get(record.manifest.engine)
    if engine is None or engine.is_peer:
        return Strategy(uncompared={"strategy": f"{record.manifest.engine} does not show what it computes"})
    if record.work is None:
        return Strategy(findings=[Finding("work.json", "", "the run did not record what a step computes")])
    run = Observed(record, record.work, engine, asked_of(record))
    findings, uncompared = list[Finding](), dict[str, str]()
    for setting, read in READ.items():
        try:
            findings += read(run)
        except ValueError as error:
            uncompared[setting] = str(error)
    if SENT not in uncompared:
        uncompared |= without_limit(run)
    return Strategy(findings, uncompared)


def asked_of(record: Record) -> Experiment:
    """The requested experiment; the manifest's without a request."""
    return record.request.experiment if record.request else record.manifest.experiment


def settings_of(record: Record, strategy: Strategy) -> dict[str, str]:
    """Settings for the tables, by key of METRICS: as observed, else as the engine declares them."""
    engine = ENGINES.get(record.manifest.engine)
    declared = engine.gradient_sync_for(asked_of(record).layout) if engine else ""
    return {
        "gradient_sync": strategy.found("layout.gradient_sync").split(" of ")[0] or declared,
        "remat": strategy.found("layout.remat") or "not observed",
        "attention": _words_of(record.work.attention) if record.work else "",
        "compiled": record.work.compiled if record.work else "",
    }


def _read_compiler(run: Observed) -> Iterator[Finding]:
    """The compiler, in engines that may compile or not."""
    asked, found = run.experiment.layout.compile, run.work.compiled.partition(",")[0] or "none"
    compiles = run.engine.layouts.compiles
    if compiles and asked in ("none", *compiles):
        yield Finding("layout.compile", asked, found)


def _read_xla(run: Observed) -> Iterator[Finding]:
    """The options with which XLA compiled the step."""
    asked = run.experiment.layout.xla
    if run.engine.is_jax and asked != "plain":
        given = run.record.manifest.compiler_options.items()
        yield Finding(
            "layout.xla", asked, asked if xla_options(run.experiment.layout).items() <= given else "plain"
        )


def blocks_that_run(engine: Engine, experiment: Experiment) -> int:
    """Number of blocks that forward runs in a step: on all ranks, or in the one program that JAX traces."""
    layout, turns = experiment.layout, experiment.microbatches_per_step
    blocks = experiment.model.n_layer // layout.pp
    if not engine.is_jax:
        return layout.devices * turns * blocks
    if layout.pp > 1:  # a stage runs at every tick, also in the bubble
        schedule = make_schedule(layout.schedule, ranks=layout.pp, microbatches=turns, chunks=layout.chunks)
        by_autodiff = turns * layout.chunks + layout.pp - 1
        turns = by_autodiff if engine.sent_by_xla else len(lock_step(schedule).tasks.kind)
    return turns * blocks // layout.chunks


def _read_remat(run: Observed) -> Iterator[Finding]:
    """Recomputation in backward, from counts of operations."""
    if run.infers_shapes:
        raise ValueError("PyTorch's pipeline infers shapes in the first step, which was observed")
    forward, again = Counter(run.work.forward), Counter(run.work.again)
    blocks = forward["activations"]
    yield Finding("blocks that forward runs", str(blocks_that_run(run.engine, run.experiment)), str(blocks))
    found = ", ".join(f"{again[part]} of {forward[part]} {part}" for part in ("products", "activations"))
    if again["activations"] >= blocks and not again["products"]:
        found = "dots"
    elif again["activations"] >= blocks and again["products"] >= forward["products"] - blocks:
        found = "full"  # backward does not use a block's last product
    elif not again["activations"] and not again["products"]:
        found = "none"
    yield Finding("layout.remat", run.engine.remat_for(run.experiment.layout), found)


def _read_attention(run: Observed) -> Iterator[Finding]:
    """The attention core, from the weights that exist at one time, or the fused kernel."""
    model = run.experiment.model
    if not run.work.attention and model.attention == "auto":
        return
    if not run.work.attention:
        raise ValueError(f"{run.engine.name} shows neither weights of attention nor a fused kernel")
    sizes = [int(each.split(" x ")[1]) for each in run.work.attention if " x " in each]
    found = {"dense" if keys == positions_of_block(run.experiment) else "blockwise" for keys in sizes}
    if len(sizes) < len(run.work.attention):
        found.add("fused" if run.engine.is_jax or model.attention == "fused" else "blockwise")
    platform = run.record.manifest.platform
    asked = model.attention
    if run.engine.is_jax:
        asked = core_in_jax(run.experiment, platform=platform, by_types=run.engine.sends_by == "types")
    words = ", ".join(sorted(found))
    yield Finding("model.attention", words if asked == "auto" else asked, words)


def _words_of(attention: Sequence[str]) -> str:
    """The observed weights or kernels of attention, in words for a table: 128 x 128, or flash kernel."""
    kernels = {each: OF_KERNEL.search(each) for each in attention}
    return ", ".join(f"{kernel[1]} kernel" if kernel else each for each, kernel in kernels.items())


def _read_loss_chunks(run: Observed) -> Iterator[Finding]:
    """Chunks of the loss, from the positions of logits and the number of products that make them."""
    chunks, layout = run.experiment.train.loss_chunks, run.experiment.layout
    # Under jit arrays have all positions of the sequence, elsewhere the positions of a device.
    length = run.experiment.model.block_size / (1 if run.engine.sent_by_xla else layout.cp)
    found = ", ".join(f"{length / positions:g}" for positions in run.work.logits_positions if positions)
    parts = run.work.forward.get("logits", 0)
    passes = blocks_that_run(run.engine, run.experiment) // run.experiment.model.n_layer
    if layout.pp == 1 and parts != chunks * passes:
        found += f", and {parts / passes:g} products for them in a pass,"
    if chunks > 1 and run.work.again.get("logits", 0) < parts:
        found += ", whose logits are kept for backward,"
    yield Finding("train.loss_chunks", str(chunks), found or "none")


def _read_schedule(run: Observed) -> Iterator[Finding]:
    """The schedule of a pipeline, from the order of its tasks."""
    layout, found = run.experiment.layout, "another order"
    if layout.pp == 1:
        return
    if not run.work.tasks:
        raise ValueError("XLA orders the tasks of a pipeline that autodiff derives")
    sizes = {"microbatches": run.experiment.microbatches_per_step, "chunks": layout.chunks}
    for name in (*run.engine.layouts.schedules, layout.schedule):  # of equal schedules the requested one
        tasks = make_schedule(name, ranks=layout.pp, **sizes)
        found = name if [[str(task) for task in rank] for rank in tasks] == run.work.tasks else found
    yield Finding("layout.schedule", layout.schedule, found)


def _read_ring(run: Observed) -> Iterator[Finding]:
    """The order of a ring: products run between the start of a hop of K, V and the wait for it."""
    layout = run.experiment.layout
    if not is_ring(run.experiment):
        return
    orders = {*run.work.rings}
    expected = {x for x in orders if not x.replace(HOP, "")} if run.engine.is_jax else orders_of_ring(layout)
    found = "ring" if orders == expected != set() else "no ring in each forward and backward"
    if odd := sorted(orders - expected):
        found = f"a ring in the order {odd[0]} (h hop, p products, w wait)"
    yield Finding("layout.context", "ring", found)


def _read_bytes_at_rest(run: Observed) -> Iterator[Finding]:
    """Bytes between two steps against the closed form, and weights of replicas against each other."""
    manifest = run.record.manifest
    yield Finding("weights of replicas at the end", "", manifest.replicas_apart)
    expected, most = (bytes_at_rest(run.engine.name, run.experiment, rounds_up=up) for up in (False, True))
    if all(step.skipped for step in run.record.steps):
        del expected["optimizer"]  # PyTorch makes the moments at the first update
    errors = {kind: excess(manifest.resident_bytes, {kind: size}, most) for kind, size in expected.items()}
    odd = [f"{kind} off by {error:+.0%}" for kind, error in errors.items() if not abs(error) <= AT_REST]
    yield Finding("bytes at rest", "", ", ".join(odd))


def _read_bytes_sent(run: Observed) -> Iterator[Finding]:
    """Bytes of a step's collectives against the textbook."""
    if run.record.ledger.problems:
        yield Finding(LEDGER, "", f"it is incomplete: {run.record.ledger.problems[0]}")
    yield Finding(SENT, "", next(unlike_textbook(run), ""))


READ: Mapping[str, Callable[[Observed], Iterator[Finding]]] = {
    "layout.compile": _read_compiler,
    "layout.xla": _read_xla,
    "precision.dtype": read_dtypes,
    "dtypes of other operations": read_kept_dtypes,
    "sums of gradients": read_gradient_sums,
    "layout.remat": _read_remat,
    "model.attention": _read_attention,
    "train.loss_chunks": _read_loss_chunks,
    "layout.schedule": _read_schedule,
    "layout.context": _read_ring,
    "layout.gradient_sync": read_gradient_sync,
    "bytes at rest": _read_bytes_at_rest,
    SENT: _read_bytes_sent,
}
"""The reader of each setting. A reader raises ValueError if it cannot compare, with the reason."""
