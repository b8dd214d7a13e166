"""Tables and figures of a plan."""

from typing import TYPE_CHECKING

from compare.contract.ahead_of_time import Waited
from compare.judge.ledger import Flow
from compare.plan.compute import Term
from compare.plan.outcome import AbsentStep, Full, PlanOutcome, StepAlone
from compare.plan.predict import PARTS, predict
from compare.plan.search import USABLE, Candidate, frontier
from compare.present.memory import memory_figure, place_of
from compare.show.figures import Figure, colour, log_scale
from compare.show.findings import Column, Table, table_of
from compare.terminal import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DROPPED = (
    Column[tuple[str, Full]]("full with", lambda row: row[0]),
    Column[tuple[str, Full]]("layouts", lambda row: row[1].layouts, ",d"),
    Column[tuple[str, Full]]("the smallest needs", lambda row: row[1].least, human_bytes),
)
FLOWS = (
    Column[Flow]("axis", lambda flow: flow.axis),
    Column[Flow]("role", lambda flow: flow.role),
    Column[Flow]("stage", lambda flow: str(flow.stage)),
    Column[Flow]("calls", lambda flow: flow.calls, ",d"),
    Column[Flow]("textbook (B)", lambda flow: flow.textbook, ",.0f"),
    Column[Flow]("sent (B)", lambda flow: flow.sent, ",d"),
    Column[Flow]("ratio", lambda flow: flow.ratio, ".2f"),
)
WAITED = (
    Column[Waited]("kind", lambda row: row.kind),
    Column[Waited]("axis", lambda row: row.axis),
    Column[Waited]("beside other work", lambda row: row.hidden_bytes, human_bytes),
    Column[Waited]("waited for", lambda row: row.waited_bytes, human_bytes),
)
MEMORY = (
    Column[tuple[str, float, float]]("of a device", lambda row: row[0]),
    Column[tuple[str, float, float]]("closed form", lambda row: row[1], human_bytes),
    Column[tuple[str, float, float]]("XLA", lambda row: row[2], human_bytes),
)
KEPT = (
    Column[tuple[str, int]]("class", lambda row: row[0]),
    Column[tuple[str, int]]("kept", lambda row: row[1], human_bytes),
)
STATE = ("parameters", "optimizer")
"""Classes of memory that are arguments of a step; gradients are temporaries of one."""
TERMS = (
    Column[Term]("part", lambda term: PARTS[term.part]),
    Column[Term]("what", lambda term: term.what),
    Column[Term]("ms", lambda term: term.seconds * 1e3, ",.3f"),
    Column[Term]("formula", lambda term: term.formula),
)


def columns(outcome: PlanOutcome) -> list[Column[Candidate]]:
    """Time, utilisation, memory, and the parts of the time."""
    return [
        Column("layout", lambda one: one.name),
        Column("step ms", lambda one: one.seconds * 1e3, ",.1f"),
        Column("MFU", lambda one: one.mfu, ".1%"),
        Column("memory", lambda one: one.bytes, human_bytes),
        *(
            Column(words, lambda one, part=part: one.parts.get(part, 0.0) * 1e3, ",.1f")
            for part, words in PARTS.items()
        ),
    ]


def about(outcome: PlanOutcome) -> str:
    """What the figures are of."""
    machine, experiment = outcome.machine, outcome.experiment
    return (
        f"Predicted, not measured. {machine.devices} devices of {human_bytes(machine.memory_bytes)}, of "
        f"which a step may have {USABLE:.0%}; {experiment.sequences_per_step} sequences of "
        f"{experiment.model.block_size} tokens a step. Memory: state exactly, all else at most."
    )


def sentence(outcome: PlanOutcome) -> str:
    """The fastest, and what most of its time is spent on; or that nothing fits."""
    dropped = sum(full.layouts for full in outcome.dropped.values())
    if not outcome.candidates:
        least, kind = min((full.least, kind) for kind, full in outcome.dropped.items())
        needs = f"the smallest needs {human_bytes(least)}, and is full with {kind}"
        return f"none of {dropped:,} layouts fits: {needs}"
    best = outcome.candidates[0]
    parts = sorted(best.parts.items(), key=lambda item: -item[1])[:3]
    said = ", ".join(f"{PARTS[part]} {seconds / best.seconds:.0%}" for part, seconds in parts)
    return (
        f"{best.name}: {best.seconds * 1e3:,.1f} ms a step, MFU {best.mfu:.1%}, {human_bytes(best.bytes)} a "
        f"device; {said}; {outcome.fitting:,} layouts fit, {dropped:,} do not"
    )


def written_out(outcome: PlanOutcome, one: Candidate) -> Table:
    """The sum of one layout, term by term."""
    predicted = predict(outcome.engine, one.of(outcome.experiment), outcome.machine)
    held = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in one.memory.items())
    return table_of(
        f"The step of {one.name}, term by term",
        TERMS,
        predicted.terms,
        look="words",
        below=f"Together {predicted.seconds * 1e3:,.3f} ms. A device holds {held}: {human_bytes(one.bytes)}.",
    )


def alone_tables(one: StepAlone, outcome: PlanOutcome) -> list[Table]:
    """What a layout's first rank sends, and what it keeps at its peak."""
    candidate = next(c for c in (*outcome.candidates, *outcome.nearest) if c.name == one.layout)
    peak, planned = one.memory.peak, candidate.bytes
    kept = [(kind, size) for kind, size in peak.bytes.items() if size]
    below = f"Its peak is {human_bytes(peak.total)}, in {peak.phase}: {place_of(peak)}."
    return [
        table_of(f"What the first rank of {one.layout} sends, run alone", FLOWS, one.flows),
        table_of("What it keeps at its peak", KEPT, kept, below=f"{below} Planned: {human_bytes(planned)}."),
    ]


def memory_alone(one: StepAlone) -> Figure:
    """Memory over the step of a layout's first rank, by class."""
    assert one.memory.curve  # PyTorch's steps are watched
    title, caption = f"Memory of the first rank of {one.layout}", "Every tensor that it keeps, by class."
    return memory_figure(title, one.memory.curve, one.memory.peak, caption=caption)


def compiled_tables(one: AbsentStep, outcome: PlanOutcome) -> list[Table]:
    """What XLA made of a layout: memory beside the plan's, sums beside the closed form, waiting."""
    found, held = one.found, next(c for c in (*outcome.candidates, *outcome.nearest) if c.name == one.layout)
    state = sum(held.memory.get(kind, 0.0) for kind in STATE)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    title = f"{one.layout} compiled for {one.topology}, {found.device}"
    below = f"{found.compile_s:.0f} CPU s to trace and compile. {versions}."
    if found.peak_bytes > USABLE * outcome.machine.memory_bytes:
        below = f"It does not fit, says XLA's plan. {below}"
    memory = [
        ("parameters and moments", state, found.state_bytes),
        ("all of a step", held.bytes, found.peak_bytes),
    ]
    sent = [table_of("What it sends in a step", FLOWS, one.flows)] if one.flows else []
    return [
        table_of(title, MEMORY, memory, look="words", below=below),
        *sent,
        table_of("What runs beside other work, in the compiler's word", WAITED, found.waited),
    ]


def frontier_figure(outcome: PlanOutcome) -> Figure:
    """Memory against time, and the layouts than which none is both faster and smaller."""
    ends = frontier(outcome.candidates)

    def draw(axes: "Axes") -> None:
        for label, some, look, shade in (
            ("layouts", outcome.candidates, "o", colour(0)),
            ("frontier", ends, "o-", colour(1)),
        ):
            sizes, times = [one.bytes / 1e9 for one in some], [one.seconds * 1e3 for one in some]
            axes.plot(sizes, times, look, color=shade, markersize=4, label=label)
        axes.set(xlabel="memory of the fullest device (GB)", ylabel="step time (ms)")
        log_scale(axes, "x", "y")

    return Figure(
        title="Memory against time",
        caption="The fastest layouts, and the frontier: none is both faster and smaller.",
        draw=draw,
    )
