"""`shardpair plan`: layouts of an experiment that are legal and fit, with memory and bytes sent per device.

Tried are all degrees whose product is the number of devices; ZeRO stages, sequence parallelism, schedules and
ways of context parallelism. For each, recomputation and accumulated passes are raised until a step fits. The
sequences of a step stay the same. A layout field given as a flag is not searched.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.communication import ring_wire_bytes
from compare.contract.record import ON_HOST
from compare.flags import DEVICES, ExperimentFlags, StudiedName
from compare.show.findings import Column, Findings, table_of
from compare.show.terminal import print_findings
from compare.spec.axes import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP, parts_of
from compare.spec.checks import check
from compare.spec.engines.registry import ENGINES, JAX, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited
from compare.terminal import errors_console
from compare.text import human_bytes
from compare.theory.communication import bytes_sent
from compare.theory.peak import LEAST, MOST, peak_of_stage

SHOWN, REASONS = 20, 3
LONG = 2**15
"""Tokens of a sequence from which context parallelism is searched."""
REMATS = ("none", "dots", "full")
"""Recomputation, the cheapest first."""
STAGES = {1: "zero1x", 2: "zero2x", 3: "fsdp"}


class Candidate(Struct, frozen=True, kw_only=True):
    """A layout, its memory and what it sends."""

    name: str
    layout: Layout
    batch_size: int
    gradient_accumulation_steps: int
    memory: dict[str, float] = {}
    """Bytes of the fullest device by kind: state in closed form, activations and logits estimated."""
    sent: float = 0.0
    """Bytes that a device sends in a step on rings, by the textbook; of the busiest end of a pipeline."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Fields that layouts of the same kind share."""
        layout = self.layout
        split = layout.tp, layout.sequence_parallel, layout.cp, layout.ep, layout.pp
        return *split, layout.zero, layout.reshard_after_forward

    @property
    def bytes(self) -> float:
        """Memory of the fullest device."""
        return sum(self.memory.values())


class Plan(ExperimentFlags, frozen=True, kw_only=True):
    """List the layouts of an experiment that are legal and fit, with memory and bytes sent. Nothing runs.

    A row has the least recomputation and the fewest passes that fit. A layout field given as a flag is not
    searched. The sequences of a step stay the same, so the data-parallel devices must divide them.

    Try:
      shardpair plan gpt2-350m --devices 64 --memory_gb 80 --train.batch_size 128
      shardpair plan gpt2-124m --devices 8 --memory_gb 16 --layout.tp 1
    """

    default = "gpt2-124m"

    devices: int = DEVICES
    """Number of devices."""
    memory_gb: float = math.inf
    """Memory of a device in GB (1e9 bytes) that a step may use. Default: any amount."""
    engine: StudiedName = REFERENCE
    """The engine whose limits, memory and messages count."""

    def __call__(self) -> int:
        """Print the table. Returns 0, or 1 if no layout fits."""
        if self.devices < 1:
            raise ExperimentError(f"--devices {self.devices}: give 1 or more")
        if not self.memory_gb > 0:
            raise ExperimentError(f"--memory_gb {self.memory_gb:g}: give more than 0")
        experiment = self.resolve()
        limit = 1e9 * self.memory_gb
        with errors_console().status(f"estimating layouts over {self.devices} devices"):  # on a terminal only
            found, refused = search(
                self.engine, experiment, self.devices, limit=limit, fixed=self.layout_flags
            )
        fitting = [candidate for candidate in found if candidate.bytes <= limit]
        too_large = [candidate for candidate in found if candidate.bytes > limit]
        if fitting:
            least = f"{fitting[0].name} sends the least: {human_bytes(fitting[0].sent)}"
            sentence = f"{len(fitting):,} layouts fit, {len(too_large):,} do not; {least}"
        else:
            smallest = min(too_large, key=lambda candidate: candidate.bytes)
            least = f"{smallest.name} needs the least, {human_bytes(smallest.bytes)}"
            sentence = f"none of {len(too_large):,} layouts fits: {least}"
        best: dict[tuple[object, ...], Candidate] = {}
        for candidate in fitting:
            best.setdefault(candidate.kind, candidate)
        by_jax = [one for one in fitting if not all(engine.why_not(one.layout) for engine in JAX.engines)]
        title = (
            f"Layouts that fit, least bytes first, one for each tp, cp, ep, pp and ZeRO stage ({len(best)})"
        )
        findings = Findings(
            study="plan",
            title=f"{self.experiment} on {self.devices} devices, {self.engine}",
            sentence=sentence,
            values={"layouts": fitting, "too_large": too_large, "refused": refused},
            passed=bool(fitting),
            about=[
                f"{experiment.sequences_per_step} sequences of {experiment.model.block_size} tokens a step. "
                f"Sent is per device and step, by the textbook. Memory is estimated for the fullest device: "
                f"estimates were {LEAST:g} to {MOST:g} times measured peaks.",
            ],
            tables=[table_of(title, COLUMNS, list(best.values())[:SHOWN])] if best else [],
            left_out=dict(itertools.islice(refused.items(), REASONS)),
            notes=[
                "the exact memory of a layout, from XLA's compiler for a chip: "
                + ledger_command(
                    self.default_experiment(self.experiment), with_layout(experiment, one), self.experiment
                )
                for one in by_jax[:1]
            ],
        )
        print_findings(findings, as_json=self.json)
        return 0 if fitting else 1


def ledger_command(base: Experiment, spec: Experiment, name: str) -> str:
    """The command that compiles a layout for GPUs and prints its memory. `base` is the named experiment."""
    flags = []
    for section, fields in msgspec.to_builtins(spec).items():
        for key, value in fields.items():
            if value != getattr(getattr(base, section), key):
                is_flag = isinstance(value, bool)
                flag = f"--{section}.{'no_' if value is False else ''}{key}"
                flags.append(flag if is_flag else f"{flag} {value}")
    return f"shardpair ledger {name} --chip h100x{spec.layout.devices} {' '.join(flags)}"


COLUMNS = (
    Column[Candidate]("layout", lambda candidate: candidate.name),
    Column[Candidate]("sent", lambda candidate: candidate.sent, human_bytes),
    Column[Candidate]("memory", lambda candidate: candidate.bytes, human_bytes),
    *(
        Column[Candidate](kind, lambda candidate, kind=kind: candidate.memory[kind], human_bytes)
        for kind in ("parameters", "gradients", "optimizer", "activations", "logits")
    ),
)


def search(
    engine: str, experiment: Experiment, devices: int, *, limit: float, fixed: frozenset[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """One candidate for each legal layout, and reasons for refused ones, by an example and their number.

    The candidates are in ascending order of the bytes sent. Each is the first that fits `limit` bytes, or the
    smallest if none fits. `fixed` are fields of the experiment's layout to keep. Raises ExperimentError: no
    layout is legal.
    """
    found: list[Candidate] = []
    reasons: dict[str, list[str]] = {}
    for layout in layouts(engine, experiment, devices, fixed=fixed):
        legal: list[Candidate] = []
        for candidate in ways(experiment, layout, fixed=fixed):
            try:
                legal.append(estimate(engine, experiment, candidate))
            except ExperimentError as error:
                reasons.setdefault(str(error), []).append(candidate.name)
                continue
            if legal[-1].bytes <= limit:
                break
        if legal:
            fits = legal[-1].bytes <= limit
            found.append(legal[-1] if fits else min(legal, key=lambda candidate: candidate.bytes))
    most_first = sorted(reasons.items(), key=lambda item: -len(item[1]))
    refused = {f"{names[0]} ({len(names):,} layouts)": why for why, names in most_first}
    if not found:
        given = ", ".join(f"layout.{axis}" for axis in experiment.layout.axes if axis in fixed)
        why = next(iter(refused.values()), f"the given {given} must divide them")
        raise ExperimentError(f"--devices {devices}: no layout is legal: {why}")
    return sorted(found, key=lambda candidate: (candidate.sent, candidate.bytes)), refused


def layouts(engine: str, experiment: Experiment, devices: int, *, fixed: frozenset[str]) -> Iterator[Layout]:
    """Layouts over all devices, with each setting that has an effect under them; not all are legal."""
    given, able = experiment.layout, ENGINES[engine].layouts

    def choices(field: str, values: Iterable[Any]) -> Iterable[Any]:
        return [getattr(given, field)] if field in fixed else values

    degrees = dict.fromkeys((TP, PP, DP_SHARD), divisors(devices))
    degrees[CP] = divisors(devices) if experiment.model.block_size >= LONG else [given.cp]
    for tp, pp, shards, cp in itertools.product(*(choices(axis, degrees[axis]) for axis in degrees)):
        replicas, rest = divmod(devices, tp * pp * shards * cp)
        if rest or (DP_REPLICATE in fixed and given.dp_replicate != replicas):
            continue
        if experiment.model.n_layer % pp and PP not in fixed:
            continue
        interleaved_chunks = max(given.chunks, 2)
        settings = {
            "zero": choices("zero", (1, 2, 3) if shards > 1 else (0,)),
            EP: choices(EP, divisors(math.gcd(shards, experiment.model.n_experts or 1))),
            "sequence_parallel": choices("sequence_parallel", (False, True) if tp > 1 else (False,)),
            "schedule": choices("schedule", able.schedules if pp > 1 else (given.schedule,)),
            "context": choices("context", able.contexts if cp > 1 else (given.context,)),
            "reshard_after_forward": choices("reshard_after_forward", (True, False)),
        }
        for values in itertools.product(*settings.values()):
            chosen = dict(zip(settings, values, strict=True))
            if not chosen["reshard_after_forward"] and chosen["zero"] != 3 and "zero" not in fixed:
                continue
            balanced = cp > 1 and chosen["context"] != "ulysses"
            is_interleaved = pp > 1 and chosen["schedule"] == "interleaved"
            (chosen["zigzag"],) = choices("zigzag", [balanced])
            (chosen["chunks"],) = choices("chunks", [interleaved_chunks if is_interleaved else 1])
            yield replace(given, tp=tp, pp=pp, dp_shard=shards, cp=cp, dp_replicate=replicas, **chosen)


def ways(experiment: Experiment, layout: Layout, *, fixed: frozenset[str]) -> Iterator[Candidate]:
    """The layout with each recomputation and number of sequences in a pass, the cheapest first."""
    sequences = experiment.sequences_per_step
    share = max(sequences // layout.data_parallel, 1)
    for remat in [layout.remat] if "remat" in fixed else REMATS:
        for rows in reversed(divisors(share)):
            passes = share // rows
            microbatches = layout.microbatches if "microbatches" in fixed else passes if layout.pp > 1 else 1
            if passes % microbatches and rows > 1:
                continue  # the last candidate keeps the contradiction, for `check` to name
            one = replace(layout, remat=remat, microbatches=microbatches)
            steps = max(passes // microbatches, 1)
            yield Candidate(
                name=name_of(one, rows),
                layout=one,
                batch_size=sequences // steps,
                gradient_accumulation_steps=steps,
            )


def with_layout(experiment: Experiment, candidate: Candidate) -> Experiment:
    """The unchecked experiment with the layout and the passes of a candidate."""
    train = {
        "batch_size": candidate.batch_size,
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
    }
    return replace(edited(experiment, {"train": train}), layout=candidate.layout)


def estimate(engine: str, experiment: Experiment, candidate: Candidate) -> Candidate:
    """Fill in the memory and bytes of a candidate. Raises ExperimentError: the layout is not legal."""
    layout = candidate.layout
    if experiment.sequences_per_step % layout.data_parallel:
        raise ExperimentError(
            f"the data-parallel devices do not divide {experiment.sequences_per_step} sequences a step: "
            f"change train.batch_size"
        )
    spec = check(with_layout(experiment, candidate))
    ENGINES[engine].require_experiment(spec)
    ends = {0, layout.pp - 1}
    memory = [peak_of_stage(engine, spec, stage=stage) for stage in ends]
    for by_kind in memory:
        by_kind.pop(ON_HOST, None)
    return replace(
        candidate,
        memory=max(memory, key=lambda by_kind: sum(by_kind.values())),
        sent=max(sent_by_stage(engine, spec, stage) for stage in ends),
    )


def sent_by_stage(engine: str, experiment: Experiment, stage: int) -> float:
    """Bytes that a device of a pipeline's stage sends in a step on rings."""
    degrees = experiment.layout.axes
    return sum(
        ring_wire_bytes(kind, round(size), math.prod(degrees[name] for name in parts_of(axis)))
        for (kind, axis, _), size in bytes_sent(engine, experiment, stage=stage).items()
    )


def name_of(layout: Layout, rows: int) -> str:
    """Name such as dp2+fsdp8+tp2sp+pp4.1f1b+rows4+full; `rows` are a device's sequences in a pass."""
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


def divisors(number: int) -> list[int]:
    """The divisors of a number, in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
