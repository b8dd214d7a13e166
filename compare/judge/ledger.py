"""A run's ledger beside the textbook, by axis and role, and beside the bytes that were recorded before."""

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.communication import METRICS, REPLICATED_GRADIENTS, Communication, summed
from compare.contract.ledger import SCALAR
from compare.numerics.parameters import block_parameters, end_parameters
from compare.spec.axes import AXES, CP, EP, REPLICAS, SHARDED_FROM, SHARDS, TP, joined_of, parts_of
from compare.spec.engines.registry import ENGINES, TORCH, side_of
from compare.spec.experiment import Experiment, Layout, edited, load
from compare.theory.communication import (
    EXCHANGE,
    SMALL,
    WIDE,
    communication,
    is_plain,
    role_of,
    textbook,
)
from compare.theory.memory import elements_of_stage, is_split_by, on_one_device, padding_of_stage

SNAPSHOT = Path(__file__).with_name("snapshot.json")
LEAST, LEAST_AS_TOLD, LEAST_IN_PIPELINE, MOST = 0.9, 0.99, 0.45, 2.1
"""Multiples of the textbook that an engine may send which decides by itself. Honest runs were seen between
0.95 and 2.00, in pipelines from 0.49 on; with an ignored `zero`, `reshard_after_forward` or
`sequence_parallel` between 0 and 0.52. As told: what types or a person say of ZeRO, seen from 1.00 on."""
OTHER_WAYS = 0.25
"""Of all that the textbook has: the most that is sent in ways that it has not, without a pipeline. 0.08 was
seen, of a table's rows that are exchanged."""
ONCE = 1.5
"""The most of gradients over replicas, which are reduced once a step and not twice; XLA reduces those of the
tied embedding for each of its uses."""


class Flow(Struct, frozen=True):
    """Logical bytes of a device in a step, along one axis for one role."""

    axis: str
    role: str
    """reduce, gather, permute, or a kind of collective."""
    stage: int
    """The rank of the pipeline; 0 without one."""
    textbook: float
    sent: int
    calls: int

    @property
    def ratio(self) -> float | None:
        """Sent of the textbook's; None if that has nothing."""
        return self.sent / self.textbook if self.textbook else None


def line_up(engine: str, experiment: Experiment, rows: Sequence[Communication]) -> list[Flow]:
    """The flows of every stage; scalars and `SMALL` are left out."""
    flows = []
    for stage in range(experiment.layout.pp):
        sent, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for row in rows:
            is_flow = row.bytes > SCALAR * row.calls and row.purpose not in (METRICS, *SMALL)
            if row.stage == stage and is_flow:
                key = row.axis, role_of(row.kind, row.axis, row.purpose)
                sent[key] += row.bytes
                calls[key] += row.calls
        expected = Counter(textbook(engine, experiment, stage=stage))
        flows += [
            Flow(*key, stage=stage, textbook=expected[key], sent=sent[key], calls=calls[key])
            for key in sorted({*expected, *sent})
        ]
    return flows


def mismatches(
    engine: str,
    experiment: Experiment,
    flows: Sequence[Flow],
    *,
    is_compiled: bool = False,
    tokens_LE: Sequence[Sequence[int]] = (),
) -> Iterator[str]:
    """Flows that are not of the layout which was asked for, as `line_up` gives them.

    They are held to the byte, but for padding, where all is written down: by us, or without a pipeline in
    calls of PyTorch's wrappers, which make none of their own choice. What a compiler sends is held to a
    multiple, and what a router sends to what it chose: `tokens_LE`, how often each expert of each layer.
    """
    said_by_pytorch = ENGINES[engine].side == TORCH.name and experiment.layout.pp == 1
    is_written_down = ENGINES[engine].counts_own_calls or said_by_pytorch
    is_exact = is_plain(experiment) and is_written_down and not is_compiled
    is_manual = not ENGINES[engine].sends_by and is_plain(experiment) and experiment.precision.dtype in WIDE
    other_ways = OTHER_WAYS * sum(flow.textbook for flow in flows) if experiment.layout.pp == 1 else math.inf
    for flow in _joined(flows):
        spare = padding_of_stage(engine, experiment, stage=flow.stage)
        to_the_byte = is_exact or (is_manual and CP in parts_of(flow.axis))
        least, most = (1 / spare, spare) if to_the_byte else _multiples(engine, experiment, flow)
        is_of_replicas = flow.role == "reduce" and {*parts_of(flow.axis)} <= {*REPLICAS}
        if is_compiled and is_of_replicas and experiment.layout.zero == SHARDED_FROM["parameters"]:
            most = math.inf  # torch.compile sums over replicas before it scatters, in each pass
        if flow.role == EXCHANGE and ENGINES[engine].sends_by in ("xla", "types", "dtensor"):
            continue  # what a compiler makes of it is a finding, and no mistake
        if flow.role == EXCHANGE and not ENGINES[engine].sends.pads_rows:
            least, most = routed(experiment.layout, tokens_LE)
        limit = most * flow.textbook + 1 if flow.textbook or is_exact else other_ways
        if not least * flow.textbook - 1 <= flow.sent <= limit:
            sent = f"{flow.sent:,} bytes of {flow.role} over {flow.axis}"
            yield f"{sent}, where the textbook has {flow.textbook:,.0f}"


def unlike_textbook(
    engine: str,
    experiment: Experiment,
    rows: Sequence[Communication],
    *,
    is_compiled: bool = False,
    tokens_LE: Sequence[Sequence[int]] = (),
) -> Iterator[str]:
    """All that a ledger has otherwise than the layout which was asked for: `mismatches`; of collectives that
    are written by hand, another kind; and of our own calls a byte more or less by kind and purpose."""
    flows = line_up(engine, experiment, rows)
    yield from mismatches(engine, experiment, flows, is_compiled=is_compiled, tokens_LE=tokens_LE)
    if ENGINES[engine].sends_by or not is_plain(experiment):
        return
    for stage in range(experiment.layout.pp):
        expected = communication(engine, experiment, stage=stage)
        kinds, sent = {(kind, axis) for kind, axis, _ in expected}, Counter[tuple[str, str, str]]()
        for row in rows:
            if row.stage == stage and row.bytes > SCALAR * row.calls and row.purpose != METRICS:
                sent[row.kind, row.axis, row.purpose] += row.bytes
        spare = padding_of_stage(engine, experiment, stage=stage)
        for kind, axis, purpose in sorted({*expected, *sent} if ENGINES[engine].counts_own_calls else sent):
            size, right = sent[kind, axis, purpose], expected.get((kind, axis, purpose), 0.0)
            # Flat shards are cut anywhere: one may have more of what tp repeats than another.
            uneven = experiment.layout.dp_shard if purpose == REPLICATED_GRADIENTS else 1
            least, most = 1 / spare, spare * uneven
            if role_of(kind, axis, purpose) == EXCHANGE and not ENGINES[engine].sends.pads_rows:
                least, most = routed(experiment.layout, tokens_LE)
            fits = least * right - 1 <= size <= most * right + 1
            if not ENGINES[engine].counts_own_calls:
                fits = (kind, axis) in kinds or purpose in SMALL
            if not fits:
                said = f"{size:,} bytes of {kind} over {axis} for {purpose or 'no purpose'}"
                yield f"{said}, where the textbook has {right:,.0f}"


def routed(layout: Layout, tokens_LE: Sequence[Sequence[int]] = ()) -> tuple[float, float]:
    """The least and the most that the busiest device of ep sends, as multiples of what a fair router would.

    Half of it goes out, and is as much as there are tokens; half goes back to whoever came, of each layer or
    over all layers. Exact to that if ep spans all data; of several groups of ep nobody says which had whom.
    """
    if not len(tokens_LE) or layout.data_parallel * layout.cp > layout.ep:
        return 1.0, (1 + layout.ep) / 2  # the busiest of them is no less busy than the mean
    of_ranks_LR = np.reshape(tokens_LE, (len(tokens_LE), layout.ep, -1)).sum(-1)
    fair = of_ranks_LR.sum() / layout.ep
    busiest = of_ranks_LR.sum(0).max(), of_ranks_LR.max(1).sum()
    return (1 + busiest[0] / fair) / 2, (1 + busiest[1] / fair) / 2


def _multiples(engine: str, experiment: Experiment, flow: Flow) -> tuple[float, float]:
    layout, is_scan = experiment.layout, ENGINES[engine].holds.residuals == "scan"
    shards = joined_of(SHARDS, layout.axes)
    if is_scan and experiment.model.n_layer == layout.pp * layout.chunks and flow.axis == shards:
        return 0.0, math.inf  # XLA unrolls a loop of one layer, and gathers once a step
    replicas = joined_of(REPLICAS, layout.axes)
    least = LEAST_IN_PIPELINE if layout.pp > 1 or flow.axis not in (replicas, shards, *AXES) else LEAST
    if least == LEAST and flow.axis == shards:
        least = LEAST if ENGINES[engine].sends_by == "xla" else LEAST_AS_TOLD
        if flow.role == "gather":  # backward need not gather biases
            block = block_parameters(experiment.model, 0)
            block = [p for p in block if layout.ep == 1 or not is_split_by(EP, p)]
            least -= sum(p.size for p in block if p.name.endswith(".bias")) / sum(p.size for p in block)
    is_narrow = experiment.precision.dtype not in WIDE
    if is_narrow:
        least /= 2  # some of it is sent in 16 bits
    together = {CP, EP} & {*parts_of(flow.axis)}
    if together and flow.role == "reduce" and ENGINES[engine].sends_by == "xla":
        return least, math.inf  # of whole gradients, in each pass: no dim of replicas lets them wait
    if (flow.axis, flow.role) == (replicas, "reduce") and layout.pp == 1:
        (token, *_), _ = end_parameters(experiment.model)
        whole = elements_of_stage(engine, experiment, stage=0)
        uses = on_one_device([token], layout) / whole if ENGINES[engine].sends_by == "xla" else 0.0
        return least, ONCE + uses
    is_bounded = flow.axis in (shards, CP, TP) and layout.pp == 1 and not is_narrow
    return least, MOST if is_bounded else math.inf


def _joined(flows: Sequence[Flow]) -> list[Flow]:
    """Flows; those over several axes (a+b) with those over each: XLA sums some of it over replicas and shards
    at once, and what the textbook sums over two axes at once it may sum over each."""
    sums: dict[tuple[str, str, int], Flow] = {}
    for flow in flows:
        like = [other.axis for other in flows if (other.stage, other.role) == (flow.stage, flow.role)]
        joints = (axis for axis in like if "+" in axis and {*parts_of(flow.axis)} <= {*parts_of(axis)})
        axis = next(joints, flow.axis)
        key = axis, flow.role, flow.stage
        if before := sums.get(key):
            total = before.textbook + flow.textbook
            flow = replace(flow, textbook=total, sent=before.sent + flow.sent)
        sums[key] = replace(flow, axis=axis)
    return list(sums.values())


class Snapshot(Struct, frozen=True, kw_only=True):
    """What every engine sent in a step under some presets, to the byte."""

    versions: dict[str, str]
    """Of the frameworks, by package."""
    experiment: dict[str, dict[str, int | float]]
    """Fields in which the experiment differs from `check`."""
    layouts: dict[str, dict[str, int | str | bool]]
    """Fields of each preset's layout."""
    ledgers: list[tuple[str, str, str, str, int, int, int]]
    """Preset, engine, kind, axis, calls, bytes, bytes on the wire: purposes added up."""


@functools.cache
def read_snapshot() -> Snapshot:
    """The recorded numbers."""
    return msgspec.json.decode(SNAPSHOT.read_bytes(), type=Snapshot)


Rows = list[tuple[str, str, int, int, int]]
"""Kind, axis, calls, bytes, bytes on the wire."""


def snapshot_rows(rows: Iterable[Communication]) -> Rows:
    """A ledger as the snapshot has it."""
    sums: dict[tuple[str, str], tuple[int, int, int]] = {}
    for row in summed(rows):
        calls, size, wire = sums.get((row.kind, row.axis), (0, 0, 0))
        sums[row.kind, row.axis] = calls + row.calls, size + row.bytes, wire + row.wire_bytes
    return [(kind, axis, *total) for (kind, axis), total in sorted(sums.items())]


def recorded_rows(engine: str, experiment: Experiment, versions: Mapping[str, str]) -> Rows:
    """What the snapshot has of an engine under an experiment; [] of another, or of other versions."""
    snapshot = read_snapshot()
    packages = [package for package in side_of(engine).packages if package in snapshot.versions]
    if any(versions.get(package, "").split("+")[0] != snapshot.versions[package] for package in packages):
        return []
    check = edited(load("check"), snapshot.experiment)
    train = (f"train.{field}" for field in ("batch_size", "gradient_accumulation_steps", "loss_chunks"))
    decides = operator.attrgetter("model", "precision.dtype", *train)
    if decides(experiment) != decides(check):
        return []
    layout = replace(experiment.layout, remat=check.layout.remat)
    for preset, fields in snapshot.layouts.items():
        if layout == replace(check.layout, **fields):
            return [row[2:] for row in snapshot.ledgers if row[:2] == (preset, engine)]
    return []
