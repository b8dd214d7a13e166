"""A run's messages against the textbook of its layout (`compare.theory.communication`).

Where all messages are written in Python, they must be the textbook's to the byte, up to padding: in
torch-manual, and in calls of PyTorch's wrappers without a pipeline. A compiler's bytes must lie within a band
around the textbook. Other messages have no closed form, and `unlike_textbook` rejects them. The command
`shardpair ledger` shows all messages.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.communication import METRICS, REPLICATED_GRADIENTS, Communication
from compare.contract.ledger import SCALAR
from compare.contract.record import Record
from compare.judge.observed import Observed
from compare.numerics.parameters import storage_dtype
from compare.spec.axes import CP, EP, REPLICAS, SHARDED_FROM, parts_of
from compare.spec.experiment import Experiment, Layout
from compare.theory.communication import EXCHANGE, SMALL, WIDE, bytes_sent, is_plain, role_of, textbook
from compare.theory.memory import padding

LEAST, MOST = 0.6, 2.1
"""Band of a compiler's bytes, as multiples of the textbook. Correct runs are between 0.9 and 2.0. With an
ignored `zero`, `reshard_after_forward` or `sequence_parallel` a run is between 0 and 0.52."""
ONCE = 1.5
"""The upper end for gradients over replicas, which are reduced once a step and not in every pass. XLA reduces
the gradients of the tied embedding for each of its two uses."""
OTHER_WAYS = 0.25
"""Share of all textbook bytes that a compiler may send where the textbook sends nothing. Worst measured:
0.08, an exchange of a table's rows."""


class Flow(Struct, frozen=True):
    """Logical bytes that a device sends in a step along one axis for one role."""

    axis: str
    role: str
    """reduce, gather, permute, exchange, or a kind of collective; of a written call its kind and purpose."""
    stage: int
    """Rank of the pipeline; 0 without one."""
    textbook: float
    sent: int
    calls: int = 0

    @property
    def ratio(self) -> float | None:
        """Sent bytes over the textbook's; None if the textbook sends nothing."""
        return self.sent / self.textbook if self.textbook else None


def is_flow(row: Communication) -> bool:
    """True unless a row is of scalars or of a purpose in `SMALL`."""
    return row.bytes > SCALAR * row.calls and row.purpose not in (METRICS, *SMALL)


def line_up(engine: str, experiment: Experiment, rows: Sequence[Communication]) -> list[Flow]:
    """The flows of every stage by axis and role, without scalars and purposes in `SMALL`."""
    flows = []
    for stage in range(experiment.layout.pp):
        sent, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for row in rows:
            if row.stage == stage and is_flow(row):
                key = row.axis, role_of(row.kind, row.axis, row.purpose)
                sent[key] += row.bytes
                calls[key] += row.calls
        expected = Counter(textbook(engine, experiment, stage=stage))
        flows += [
            Flow(*key, stage=stage, textbook=expected[key], sent=sent[key], calls=calls[key])
            for key in sorted({*expected, *sent})
        ]
    return flows


def unlike_textbook(run: Observed) -> Iterator[str]:
    """Describe each flow that the layout does not explain.

    Raises ValueError: the run's messages have no closed form; the text says why.
    """
    engine, layout, experiment = run.engine, run.experiment.layout, run.experiment
    rows, is_exact = run.record.ledger.rows, _is_exact(run)
    if not is_plain(experiment):
        raise ValueError("a pipeline that gathers parameters ahead of its tasks has no closed form")
    if engine.counts_own_calls:
        yield from _unlike_calls(run)
        return
    if layout.pp > 1:
        raise ValueError(f"{engine.name} has no closed form of its messages in a pipeline")
    if not is_exact and experiment.precision.dtype not in WIDE:
        raise ValueError(f"{engine.name} has no closed form of its messages in 16 bits")
    if not is_exact and engine.is_jax and experiment.model.n_layer == 1:
        raise ValueError("XLA unrolls a loop over one layer, which has no closed form")
    flows, spare = line_up(engine.name, experiment, rows), padding(engine.name, experiment)
    other_ways = 0.0 if is_exact else OTHER_WAYS * sum(flow.textbook for flow in flows)
    for flow in flows if is_exact else _join(flows):
        least, most = (1 / spare, spare) if is_exact else _band(run, flow)
        if flow.role == EXCHANGE and is_exact:
            least, most = routed(layout, _tokens_LE(run.record))
        limit = most * flow.textbook + _of_chunks(run, flow) + 1 if flow.textbook else other_ways
        if not least * flow.textbook - 1 <= flow.sent <= limit:
            yield _describe(flow)
    if not engine.sends_by:  # written by hand, and compiled by XLA
        kinds = {(kind, axis) for kind, axis, _ in bytes_sent(engine.name, experiment)}
        for row in rows:
            if is_flow(row) and (row.kind, row.axis) not in kinds:
                yield _describe(Flow(row.axis, f"{row.kind} for {row.purpose}", row.stage, 0.0, row.bytes))


def without_limit(run: Observed) -> dict[str, str]:
    """Flows of a compiler whose bytes have no limit, or no upper one, in words, with the reason."""
    if run.engine.counts_own_calls or _is_exact(run):
        return {}
    whys = {}
    for flow in _join(line_up(run.engine.name, run.experiment, run.record.ledger.rows)):
        what, (least, most) = f"{flow.role} over {flow.axis}", _band(run, flow)
        if flow.textbook and not least:
            whys[what] = "a compiler may gather tokens instead"
        elif flow.textbook and math.isinf(most):
            whys[f"the upper limit of {what}"] = "a compiler may reduce full gradients in each pass"
    return whys


def _is_exact(run: Observed) -> bool:
    """True for calls of PyTorch's wrappers, which send the textbook up to padding."""
    return run.engine.sends_by == "pytorch" and not run.work.compiled


def _unlike_calls(run: Observed) -> Iterator[str]:
    """Calls that are counted where they are made: the bytes of each kind and purpose."""
    name, layout = run.engine.name, run.experiment.layout
    for stage in range(layout.pp):
        expected, sent = bytes_sent(name, run.experiment, stage=stage), Counter[tuple[str, str, str]]()
        for row in run.record.ledger.rows:
            if row.stage == stage and row.bytes > SCALAR * row.calls and row.purpose != METRICS:
                sent[row.kind, row.axis, row.purpose] += row.bytes
        spare = padding(name, run.experiment, stage=stage)
        for key in sorted({*expected, *sent}):
            (kind, axis, purpose), right = key, expected.get(key, 0.0)
            least, most = 1 / spare, spare
            if purpose == REPLICATED_GRADIENTS:
                most *= layout.dp_shard  # flat shards are cut anywhere: one may have all that tp replicates
            if role_of(*key) == EXCHANGE:
                least, most = routed(layout, _tokens_LE(run.record))
            if not least * right - 1 <= sent[key] <= most * right + 1:
                yield _describe(Flow(axis, f"{kind} for {purpose or 'no purpose'}", stage, right, sent[key]))


def _describe(flow: Flow) -> str:
    sent = f"{flow.sent:,} bytes of {flow.role} over {flow.axis}"
    return f"{sent}, where the textbook has {flow.textbook:,.0f}"


def _band(run: Observed, flow: Flow) -> tuple[float, float]:
    """Least and most bytes of a compiler, as multiples of the textbook."""
    axes, layout = {*parts_of(flow.axis)}, run.experiment.layout
    if flow.role == EXCHANGE and not run.engine.pads_rows:
        return 0.0, math.inf  # a compiler may gather instead: the ledger shows it
    is_of_replicas = flow.role == "reduce" and axes <= {*REPLICAS}
    if flow.role == "reduce" and axes & {CP, EP} and run.engine.sends_by == "xla":
        return LEAST, math.inf  # XLA reduces full gradients in each pass: no dim of replicas defers them
    if is_of_replicas and run.work.compiled and layout.zero == SHARDED_FROM["parameters"]:
        return LEAST, math.inf  # torch.compile reduces over replicas before it scatters, in each pass
    return LEAST, ONCE if is_of_replicas else MOST


def _of_chunks(run: Observed, flow: Flow) -> float:
    """Bytes that XLA adds in the loop over chunks of logits: it reduces the head's gradient in each chunk."""
    model, chunks = run.experiment.model, run.experiment.train.loss_chunks
    if flow.role != "reduce" or run.engine.sends_by != "xla":
        return 0.0
    size = model.vocab_size * model.n_embd * storage_dtype(run.experiment).itemsize
    return (chunks - 1) * size / run.experiment.layout.tp


def _join(flows: Sequence[Flow]) -> list[Flow]:
    """Flows over several axes (a+b) joined with the flows over each of the axes.

    XLA may reduce over replicas and shards at once, or one after another where the textbook does it at once.
    """
    sums: dict[tuple[str, str], Flow] = {}
    for flow in flows:
        like = [other.axis for other in flows if other.role == flow.role]
        joints = (axis for axis in like if "+" in axis and {*parts_of(flow.axis)} <= {*parts_of(axis)})
        axis = next(joints, flow.axis)
        before = sums.get((axis, flow.role), Flow(axis, flow.role, 0, 0.0, 0))
        both = {"textbook": before.textbook + flow.textbook, "sent": before.sent + flow.sent}
        sums[axis, flow.role] = replace(before, **both)
    return list(sums.values())


def _tokens_LE(record: Record) -> list[list[int]]:
    """How often each expert was chosen in the step that the ledger is of, by layer."""
    watched = next((step for step in record.steps if step.instrumented), record.steps[-1])
    return watched.tokens_per_expert or []


def routed(layout: Layout, tokens_LE: Sequence[Sequence[int]] = ()) -> tuple[float, float]:
    """Least and most bytes of the busiest device of ep, as multiples of a fair router's.

    Half of the bytes are a device's own tokens. The other half are the rows that came, which go back: of the
    busiest device over all layers, or of the busiest in each layer. Exact if ep spans all data. Of several
    groups of ep the record does not show which group had which tokens.
    """
    if not len(tokens_LE) or layout.data_parallel * layout.cp > layout.ep:
        return 1.0, (1 + layout.ep) / 2
    of_ranks_LR = np.reshape(tokens_LE, (len(tokens_LE), layout.ep, -1)).sum(-1)
    fair = of_ranks_LR.sum() / layout.ep
    busiest = of_ranks_LR.sum(0).max(), of_ranks_LR.max(1).sum()
    return (1 + busiest[0] / fair) / 2, (1 + busiest[1] / fair) / 2
