"""Legal layouts of an experiment on a machine, those that fit, and how long a step of each should take.

Enumerated: degrees whose product is the devices, of cp where sequences are long; ZeRO stages; sequence
parallelism; schedules and chunks of a pipeline; recomputation; and how many sequences a device has in a pass,
each number half as large again as the one before: accumulated passes, or microbatches of a pipeline, make up
the rest of the step's sequences, which stay as they are. A field that the user gave stays as it was given.
What an engine refuses is told by reason.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from compare.contract.record import ON_HOST
from compare.plan.compute import GPT, PARTS, Part, Variant, shape_of
from compare.plan.machine import Machine
from compare.plan.predict import predict, ways_of
from compare.spec.axes import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from compare.spec.checks import check
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited
from compare.theory.memory import KINDS
from compare.theory.peak import peak_of_stage

USABLE = 0.95
"""Share of a device's memory that a step may have; the rest is the driver's and the allocator's."""
ROWS = 1.5
"""Of sequences of a pass, how many times the number before a number is, or more: between two of them a step
differs by less than a prediction is off."""
CHUNKS = 2
LONG = 2**15
"""Tokens of a sequence from which cp is tried unasked: shorter ones are spread by rows."""
REMATS = ("none", "dots", "full")
STAGES = {1: "zero1x", 2: "zero2x", 3: "fsdp"}


class Candidate(Struct, frozen=True, kw_only=True):
    """A legal layout: what it holds, and how long a step takes if it fits."""

    name: str
    layout: Layout
    batch_size: int
    gradient_accumulation_steps: int
    memory: dict[str, float] = {}
    """Bytes of the fullest device, by class: state exactly, activations and logits estimated."""
    seconds: float = 0.0
    """Of a step; 0 for one that does not fit."""
    mfu: float = 0.0
    parts: dict[Part, float] = {}
    """Seconds."""
    alike: int = 0
    """How many layouts of the same kind are slower, or larger: see `folded`."""

    @property
    def kind(self) -> tuple[object, ...]:
        """What tells it from layouts whose times a prediction cannot tell apart."""
        layout = self.layout
        return layout.tp, layout.cp, layout.context, layout.pp, layout.schedule, layout.chunks, layout.remat

    @property
    def bytes(self) -> float:
        """Of the fullest device."""
        return sum(self.memory.values())

    def of(self, experiment: Experiment) -> Experiment:
        """The experiment under this layout."""
        steps = self.gradient_accumulation_steps
        train = {"batch_size": self.batch_size, "gradient_accumulation_steps": steps}
        return replace(edited(experiment, {"train": train}), layout=self.layout)


class Search(Struct, frozen=True, kw_only=True):
    """Every legal layout."""

    fitting: list[Candidate]
    """Fastest first."""
    too_large: list[Candidate]
    """Smallest first."""
    refused: dict[str, str]
    """Reasons, by the layouts that each refused; that of the most first."""


def search(
    engine: str,
    experiment: Experiment,
    machine: Machine,
    *,
    fixed: frozenset[str],
    variant: Variant = GPT,
) -> Search:
    """Every legal layout, ranked; `fixed` are fields of the experiment's layout that the user gave.

    Raises ExperimentError: no peak for this dtype, or not one legal layout.
    """
    machine.peak_of(experiment.precision.product_dtype)
    found: list[Candidate] = []
    refused: dict[str, list[str]] = {}
    for candidate in candidates(engine, experiment, machine, fixed=fixed):
        try:
            found.append(_considered(engine, experiment, machine, candidate, variant))
        except ExperimentError as error:
            refused.setdefault(str(error), []).append(candidate.name)
    if not found:
        degrees = (
            f"layout.{axis} = {size}" for axis, size in experiment.layout.axes.items() if axis in fixed
        )
        why = max(refused, key=lambda reason: len(refused[reason]), default="") or (
            f"{', '.join(degrees)}: the given degrees must divide its {machine.devices} devices"
        )
        raise ExperimentError(f"--machine {machine.name}: no layout is legal: {why}")
    found.sort(key=lambda candidate: (candidate.seconds, candidate.bytes))
    return Search(
        fitting=[candidate for candidate in found if candidate.seconds],
        too_large=[candidate for candidate in found if not candidate.seconds],
        refused={
            f"{names[0]} ({len(names):,} layouts)": why
            for why, names in sorted(refused.items(), key=lambda item: -len(item[1]))
        },
    )


def _considered(
    engine: str, experiment: Experiment, machine: Machine, candidate: Candidate, variant: Variant
) -> Candidate:
    """One layout with its memory and its time. Raises ExperimentError: it cannot be."""
    if experiment.sequences_per_step % candidate.layout.data_parallel:
        raise ExperimentError(
            f"{experiment.sequences_per_step} sequences a step do not divide by the data-parallel devices: "
            f"a multiple of {machine.devices} does"
        )
    spec = check(candidate.of(experiment))
    ENGINES[engine].require_experiment(spec)
    candidate = replace(candidate, memory=memory_of(engine, spec, variant))
    if candidate.bytes > USABLE * machine.memory_bytes:
        return candidate
    found = predict(engine, spec, machine, **ways_of(engine, spec, variant))
    parts = {part: found.of_part(part) for part in PARTS}
    return replace(candidate, seconds=found.seconds, mfu=found.mfu, parts=parts)


def folded(layouts: list[Candidate]) -> list[Candidate]:
    """The first of each kind. Within one, replicas and shards, ZeRO stages and sequences of a pass differ:
    the best ten would else be one layout ten times.
    """
    kinds = Counter(candidate.kind for candidate in layouts)
    first = {candidate.kind: candidate for candidate in reversed(layouts)}
    return [
        replace(candidate, alike=kinds[candidate.kind] - 1)
        for candidate in layouts
        if first[candidate.kind] is candidate
    ]


def memory_of(engine: str, experiment: Experiment, variant: Variant = GPT) -> dict[str, float]:
    """Bytes of the fullest device by class; of a pipeline its first or its last rank."""
    ways, model = ways_of(engine, experiment, variant), experiment.model
    grown = ways["scale"]["weights"] if ways else 1.0
    kept = max(shape_of(model, variant).kept / shape_of(model).kept, grown)  # gathered weights among it
    scale = dict.fromkeys(KINDS, grown) | {"activations": kept}
    stages = {0, experiment.layout.pp - 1}
    held = [peak_of_stage(engine, experiment, stage=stage) for stage in stages]
    on_device = [
        {kind: size * scale.get(kind, 1.0) for kind, size in sizes.items() if kind != ON_HOST}
        for sizes in held
    ]
    return max(on_device, key=lambda sizes: sum(sizes.values()))


def name_of(layout: Layout, rows: int) -> str:
    """A layout in a word: fsdp8+tp2sp+pp2.1f1b+rows4+full."""
    zero = "shard_grad_op" if not layout.reshard_after_forward else STAGES.get(layout.zero, "")
    chunks = f".x{layout.chunks}" if layout.chunks > 1 else ""
    parts = [
        f"dp{layout.dp_replicate}" if layout.dp_replicate > 1 else "",
        f"{zero}{layout.dp_shard}" if layout.dp_shard > 1 else "",
        f"{EP}{layout.ep}" if layout.ep > 1 else "",
        f"{TP}{layout.tp}{'sp' if layout.sequence_parallel else ''}" if layout.tp > 1 else "",
        f"{CP}{layout.cp}.{layout.context}{'.zigzag' * layout.zigzag}" if layout.cp > 1 else "",
        f"{PP}{layout.pp}.{layout.schedule}{chunks}" if layout.pp > 1 else "",
        f"rows{rows}",
        layout.remat,
    ]
    return "+".join(filter(None, parts))


def candidates(
    engine: str, experiment: Experiment, machine: Machine, *, fixed: frozenset[str], ratio: float = ROWS
) -> Iterator[Candidate]:
    """Layouts whose degrees multiply to the machine's devices, with each setting that means something under
    them, and numbers of sequences that a device may have in a pass. Not all are legal. `ratio` is as `ROWS`.
    """
    asked, devices, sequences = experiment.layout, machine.devices, experiment.sequences_per_step

    def choices(field: str, values: Iterable[Any]) -> Iterable[Any]:
        """Those to try, or the one that was given."""
        return [getattr(asked, field)] if field in fixed else values

    degrees_of_all = divisors(devices)
    tried = {TP: degrees_of_all, PP: degrees_of_all, DP_SHARD: degrees_of_all}
    tried[CP] = degrees_of_all if experiment.model.block_size >= LONG else [asked.cp]
    for tp, pp, shards, cp in itertools.product(*(choices(axis, tried[axis]) for axis in tried)):
        replicas, rest = divmod(devices, tp * pp * shards * cp)
        if rest or (DP_REPLICATE in fixed and asked.dp_replicate != replicas):
            continue
        if tp > machine.devices_inside and TP not in fixed:
            continue  # sums of activations over slow links: legal, and never among the best
        if experiment.model.n_layer % pp and PP not in fixed:
            continue
        degrees = {TP: tp, PP: pp, DP_SHARD: shards, CP: cp, DP_REPLICATE: replicas}
        share = max(sequences // (shards * replicas), 1)
        settings = {
            "zero": choices("zero", (1, 2, 3) if shards > 1 else (0,)),
            "ep": choices("ep", divisors(math.gcd(shards, experiment.model.n_experts or 1))),
            "sequence_parallel": choices("sequence_parallel", (True, False) if tp > 1 else (False,)),
            "schedule": choices("schedule", ENGINES[engine].layouts.schedules if pp > 1 else ("1f1b",)),
            "context": choices("context", (cp > 1 and ENGINES[engine].layouts.contexts) or [asked.context]),
            "remat": choices("remat", REMATS),
            "reshard_after_forward": choices("reshard_after_forward", (True, False)),
        }
        for values in itertools.product(*settings.values()):
            layout = replace(asked, **degrees, **dict(zip(settings, values, strict=True)))
            if not (layout.zero == 3 or layout.reshard_after_forward or "reshard_after_forward" in fixed):
                continue
            balanced = cp > 1 and layout.context != "ulysses"
            layout = replace(layout, zigzag=asked.zigzag if "zigzag" in fixed else balanced)
            default = CHUNKS if layout.schedule == "interleaved" and pp > 1 else 1
            for rows, chunks in itertools.product(divisors(share, ratio), choices("chunks", [default])):
                passes = share // rows
                (microbatches,) = choices("microbatches", [passes if pp > 1 else 1])
                steps, rest = divmod(passes, microbatches)
                if rest and rows > 1:
                    continue  # if none is possible, one is left, which its check refuses
                steps = 1 if rest else steps
                one = replace(layout, microbatches=microbatches, chunks=chunks)
                yield Candidate(
                    name=name_of(one, rows),
                    layout=one,
                    batch_size=sequences // steps,
                    gradient_accumulation_steps=steps,
                )


@functools.lru_cache(maxsize=256)
def divisors(number: int, ratio: float = 1.0) -> list[int]:
    """Of a number, each so many times the one before, or more; and the number itself."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    kept: list[int] = []
    for divisor in sorted({*small, *(number // divisor for divisor in small)}):
        if not kept or divisor >= ratio * kept[-1] or divisor == number:
            kept.append(divisor)
    return kept
