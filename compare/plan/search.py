"""Legal layouts of an experiment on a machine, those that fit, and how long a step of each should take.

Enumerated: degrees whose product is the devices; ZeRO stages; sequence parallelism; schedules and chunks of a
pipeline; recomputation; sizes of gradient buckets, of which the fastest stays; and how many sequences a
device has in a pass, powers of two: accumulated passes, or microbatches of a pipeline, make up the rest of
the step's sequences, which stay as they are. A field that the user gave stays as it was given. What an engine
refuses, and what has no closed form, is counted by reason.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from compare.contract.record import ON_HOST
from compare.judge.closed_forms.peak import peak_of_stage
from compare.plan.compute import Part, peak_of
from compare.plan.machine import Machine
from compare.plan.predict import PARTS, Prediction, predict
from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, TP
from compare.spec.checks import check
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited

Choices = Callable[[str, list[Any]], list[Any]]
"""A field of the layout, and values to try -> those values, or the one that was given."""
USABLE = 0.95
"""Share of a device's memory that a step may have; the rest is the driver's and the allocator's."""
CHUNKS = 2
BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
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

    @property
    def bytes(self) -> float:
        """Of the fullest device."""
        return sum(self.memory.values())

    def of(self, experiment: Experiment) -> Experiment:
        """The experiment under this layout."""
        train = {
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }
        return msgspec.structs.replace(edited(experiment, {"train": train}), layout=self.layout)

    def too_large(self, limit: float) -> str:
        """The class with which a device is full, in the order in which they come; '' if all fit."""
        held = 0.0
        for kind, size in self.memory.items():
            held += size
            if held > limit:
                return kind
        return ""


class Found(Struct, frozen=True, kw_only=True):
    """All that a search found."""

    fitting: list[Candidate]
    """Fastest first."""
    dropped: list[Candidate]
    """What does not fit."""
    refused: dict[str, str]
    """Reasons of an engine, or of the closed forms, by the layouts that each refused."""


def search(engine: str, experiment: Experiment, machine: Machine, *, fixed: frozenset[str]) -> Found:
    """Every legal layout, ranked.

    Args:
        engine: a name in ENGINES.
        experiment: its layout has the fields that are fixed.
        machine: with so many devices.
        fixed: fields of the layout that the user gave.

    Raises:
        ExperimentError: no peak for this dtype, or not one legal layout.
    """
    peak_of(machine, experiment.precision.product_dtype)
    fitting, dropped = [], []
    refused: dict[str, list[str]] = {}
    for layout, rows in _layouts(engine, experiment, machine, fixed):
        try:
            candidate, prediction = considered(engine, experiment, machine, layout, rows)
        except ExperimentError as error:
            refused.setdefault(str(error), []).append(name_of(layout, rows))
            continue
        if prediction:
            fitting.append(
                with_best_buckets(engine, experiment, machine, with_time(candidate, prediction), fixed)
            )
        else:
            dropped.append(candidate)
    if not fitting and not dropped:
        raise ExperimentError(_none(experiment, machine, refused))
    order = sorted(fitting, key=lambda one: (one.seconds, one.bytes))
    return Found(fitting=order, dropped=dropped, refused={_several(own): why for why, own in refused.items()})


def considered(
    engine: str, experiment: Experiment, machine: Machine, layout: Layout, rows: int
) -> tuple[Candidate, Prediction | None]:
    """One layout: what it holds, and its prediction if that fits.

    Args:
        engine, experiment, machine: as of `search`.
        layout: without microbatches.
        rows: sequences of a device in a pass.

    Raises:
        ExperimentError: it cannot be, or the engine refuses it, or nobody knows what it sends.
    """
    passes = experiment.sequences_per_step // (layout.data_parallel * rows)
    whole = layout.pp > 1
    if whole:
        layout = msgspec.structs.replace(layout, microbatches=passes)
    steps = 1 if whole else passes
    candidate = Candidate(
        name=name_of(layout, rows),
        layout=layout,
        batch_size=experiment.sequences_per_step // steps,
        gradient_accumulation_steps=steps,
    )
    spec = check(candidate.of(experiment))
    ENGINES[engine].require_experiment(spec)
    candidate = msgspec.structs.replace(candidate, memory=memory_of(engine, spec))
    if candidate.too_large(USABLE * machine.memory_bytes):
        return candidate, None
    try:
        return candidate, predict(engine, spec, machine)
    except ExperimentError:
        raise
    except ValueError as error:
        raise ExperimentError(str(error)) from None


def with_time(candidate: Candidate, prediction: Prediction) -> Candidate:
    """The candidate with the time of its step."""
    return msgspec.structs.replace(
        candidate,
        seconds=prediction.seconds,
        mfu=prediction.mfu,
        parts={part: prediction.of_part(part) for part in PARTS},
    )


def with_best_buckets(
    engine: str, experiment: Experiment, machine: Machine, candidate: Candidate, fixed: frozenset[str]
) -> Candidate:
    """The candidate with the size of buckets that is fastest, where its engine reduces gradients in some.

    Many small ones pay latency for each; of few large ones the last, which nothing hides, is long.

    Args:
        engine, experiment, machine, fixed: as of `search`.
        candidate: with its time, under the experiment's size.
    """
    layout = candidate.layout
    buckets = ENGINES[engine].gradient_sync_for(layout) == "bucketed" and layout.dp_replicate > 1
    if not buckets or "bucket_mb" in fixed:
        return candidate
    found = [candidate]
    for size in BUCKETS_MB:
        if size != layout.bucket_mb:
            other = msgspec.structs.replace(layout, bucket_mb=size)
            one = msgspec.structs.replace(candidate, layout=other, name=f"{candidate.name}+bucket{size:g}")
            found.append(with_time(one, predict(engine, one.of(experiment), machine)))
    return min(found, key=lambda one: one.seconds)


def memory_of(engine: str, experiment: Experiment) -> dict[str, float]:
    """Bytes of the fullest device by class; of a pipeline its first or its last rank."""
    stages = {0, experiment.layout.pp - 1}
    held = [peak_of_stage(engine, experiment, stage=stage) for stage in stages]
    fullest = max(held, key=lambda one: sum(one.values()) - one.get(ON_HOST, 0.0))
    return {kind: size for kind, size in fullest.items() if kind != ON_HOST}


def name_of(layout: Layout, rows: int) -> str:
    """A layout in a word: fsdp8+tp2sp+pp2.1f1b+rows4+full."""
    zero = "shard_grad_op" if not layout.reshard_after_forward else STAGES.get(layout.zero, "")
    chunks = f".x{layout.chunks}" if layout.chunks > 1 else ""
    parts = [
        f"dp{layout.dp_replicate}" if layout.dp_replicate > 1 else "",
        f"{zero}{layout.dp_shard}" if layout.dp_shard > 1 else "",
        f"{TP}{layout.tp}{'sp' if layout.sequence_parallel else ''}" if layout.tp > 1 else "",
        f"{PP}{layout.pp}.{layout.schedule}{chunks}" if layout.pp > 1 else "",
        f"rows{rows}",
        layout.remat,
    ]
    return "+".join(filter(None, parts))


def frontier(candidates: list[Candidate]) -> list[Candidate]:
    """Those than which none is both faster and smaller, fastest first."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.seconds, one.bytes)):
        if not found or one.bytes < found[-1].bytes:
            found.append(one)
    return found


def _layouts(
    engine: str, experiment: Experiment, machine: Machine, fixed: frozenset[str]
) -> Iterator[tuple[Layout, int]]:
    """Layouts whose degrees multiply to the machine's devices, and rows of a pass on a device."""
    asked, own = experiment.layout, ENGINES[engine]

    def choices(field: str, values: list[Any]) -> list[Any]:
        return [getattr(asked, field)] if field in fixed else values

    for tp in choices(TP, _divisors(machine.devices)):
        if machine.devices % tp or (tp > machine.devices_inside and TP not in fixed):
            continue  # sums of activations over slow links: legal, and never among the best
        for pp in choices(PP, _divisors(machine.devices // tp)):
            if experiment.model.n_layer % pp and PP not in fixed:
                continue
            data = machine.devices // tp // pp
            for shard in choices(DP_SHARD, _divisors(data)):
                degrees = {TP: tp, PP: pp, DP_SHARD: shard, DP_REPLICATE: data // shard}
                if tp * pp * shard * (data // shard) != machine.devices:
                    continue
                if DP_REPLICATE in fixed and asked.dp_replicate != data // shard:
                    continue
                yield from _settings(asked, degrees, own.layouts.schedules, choices, experiment)


def _settings(
    asked: Layout,
    degrees: dict[str, int],
    schedules: tuple[str, ...],
    choices: Choices,
    experiment: Experiment,
) -> Iterator[tuple[Layout, int]]:
    """Settings that mean something under these degrees, and rows of a pass."""
    share, rest = divmod(experiment.sequences_per_step, degrees[DP_SHARD] * degrees[DP_REPLICATE])
    if rest:
        yield msgspec.structs.replace(asked, **degrees, zero=3 if degrees[DP_SHARD] > 1 else 0), 1
        return
    zeros = choices("zero", [1, 2, 3] if degrees[DP_SHARD] > 1 else [0])
    sequences = choices("sequence_parallel", [True, False] if degrees[TP] > 1 else [False])
    plans = choices("schedule", list(schedules)) if degrees[PP] > 1 else ["1f1b"]
    remats, all_rows = choices("remat", list(REMATS)), _rows(share)
    for zero, parallel, schedule, remat, rows in itertools.product(zeros, sequences, plans, remats, all_rows):
        for reshard in choices("reshard_after_forward", [True, False] if zero == 3 else [True]):
            settings = {"zero": zero, "reshard_after_forward": reshard, "sequence_parallel": parallel}
            settings |= {"schedule": schedule, "chunks": CHUNKS if schedule == "interleaved" else 1}
            yield msgspec.structs.replace(asked, **degrees, **settings, remat=remat, microbatches=1), rows


def _rows(share: int) -> list[int]:
    """Powers of two that divide a device's sequences, and all of them."""
    powers = [2**power for power in range(share.bit_length()) if share % 2**power == 0]
    return list(dict.fromkeys((*powers, share)))


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _several(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1:,} like it" if len(names) > 1 else "")


def _none(experiment: Experiment, machine: Machine, refused: dict[str, list[str]]) -> str:
    if refused:
        why = max(refused, key=lambda reason: len(refused[reason]))
        return f"--machine {machine.name}: no layout is legal: {why}"
    degrees = " x ".join(f"layout.{key} = {size}" for key, size in experiment.layout.axes.items() if size > 1)
    return (
        f"--machine {machine.name}: {degrees or 'the layout'} does not fit its {machine.devices} devices: "
        f"the degrees that are given must divide them"
    )
