"""What `shardpair plan` keeps, and its tables and figures."""

from typing import TYPE_CHECKING

from msgspec import Struct

from compare.judge.closed_forms.peak import LEAST, MOST
from compare.judge.ledger import Flow
from compare.plan.compute import PARTS, Term
from compare.plan.machine import Machine
from compare.plan.predict import predict
from compare.plan.search import USABLE, Candidate
from compare.show.figures import Figure, colour, log_scale
from compare.show.findings import Column, Table, table_of
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bytes = tuple[str, float | None, float | None]
"""A class of memory, its bytes in the plan, and as a side found them."""
FLOWS = (
    Column[Flow]("axis", lambda flow: flow.axis),
    Column[Flow]("role", lambda flow: flow.role),
    Column[Flow]("stage", lambda flow: str(flow.stage)),
    Column[Flow]("calls", lambda flow: flow.calls, ",d"),
    Column[Flow]("textbook (B)", lambda flow: flow.textbook, ",.0f"),
    Column[Flow]("sent (B)", lambda flow: flow.sent, ",d"),
    Column[Flow]("ratio", lambda flow: flow.ratio, ".2f"),
)
MEMORY = (
    Column[Bytes]("of a device", lambda row: row[0]),
    Column[Bytes]("planned", lambda row: row[1], human_bytes),
    Column[Bytes]("found", lambda row: row[2], human_bytes),
)
TERMS = (
    Column[Term]("part", lambda term: term.part),
    Column[Term]("term", lambda term: term.label),
    Column[Term]("ms", lambda term: term.seconds * 1e3, ",.3f"),
)
LAYOUTS = (
    Column[Candidate]("layout", lambda candidate: candidate.name),
    Column[Candidate]("step ms", lambda candidate: candidate.seconds * 1e3, ",.1f"),
    Column[Candidate]("MFU", lambda candidate: candidate.mfu, ".1%"),
    Column[Candidate]("memory", lambda candidate: candidate.bytes, human_bytes),
    *(
        Column[Candidate](part, lambda candidate, part=part: candidate.parts.get(part, 0.0) * 1e3, ",.1f")
        for part in PARTS
    ),
)


class AbsentStep(Struct, frozen=True, kw_only=True):
    """One layout's step on devices that are not here: what it sends and keeps, as a side found."""

    title: str
    flows: list[Flow]
    memory: list[Bytes]
    below: str
    problems: list[str]
    """What does not fit the layout, or could not be read."""


class Plan(Struct, frozen=True, kw_only=True):
    """Layouts that fit, fastest first, and how many do not."""

    machine: Machine
    engine: str
    candidates: list[Candidate]
    """The fastest."""
    fitting: int
    """How many there were."""
    smallest: list[Candidate]
    """The smallest of those that do not fit."""
    too_large: int
    """How many there were."""
    explain: str = ""
    """The layout whose sum is written out."""
    absent: list[AbsentStep] = []

    def chosen(self) -> Candidate:
        """The layout of --explain, which need not fit; else the fastest, or the smallest if none fits.

        Raises ExperimentError: none has this name or place.
        """
        layouts, places = [*self.candidates, *self.smallest], len(self.candidates)
        named = {"": layouts[0]} | {candidate.name: candidate for candidate in layouts}
        named |= {str(place): candidate for place, candidate in enumerate(self.candidates, 1)}
        if self.explain not in named:
            wrong = f"--explain {self.explain}: give a place from 1 to {places}, or the name of a layout"
            raise ExperimentError(f"{wrong} that is kept")
        return named[self.explain]


def about(plan: Plan, experiment: Experiment) -> str:
    """What the figures are of."""
    return (
        f"Predicted, not measured. {plan.machine.devices} devices of "
        f"{human_bytes(plan.machine.memory_bytes)}, of which a step may have {USABLE:.0%}; "
        f"{experiment.sequences_per_step} sequences of {experiment.model.block_size} tokens a step. "
        f"Memory is an estimate, {LEAST:g} to {MOST:g} times as much as was measured."
    )


def sentence(plan: Plan) -> str:
    """The fastest, and what most of its time is spent on; or that nothing fits."""
    if not plan.candidates:
        least = plan.smallest[0]
        return (
            f"none of {plan.too_large:,} layouts fits: the smallest, {least.name}, needs "
            f"{human_bytes(least.bytes)}: {_classes(least)}"
        )
    best = plan.candidates[0]
    parts = sorted(best.parts.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{part} {seconds / best.seconds:.0%}" for part, seconds in parts)
    return (
        f"{best.name}: {best.seconds * 1e3:,.1f} ms a step, MFU {best.mfu:.1%}, {human_bytes(best.bytes)} a "
        f"device; {shares}; {plan.fitting:,} layouts fit, {plan.too_large:,} do not"
    )


def _classes(candidate: Candidate) -> str:
    return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in candidate.memory.items())


def terms_table(plan: Plan, experiment: Experiment) -> Table:
    """The sum of one layout, term by term."""
    candidate = plan.chosen()
    predicted = predict(plan.engine, candidate.of(experiment), plan.machine)
    return table_of(
        f"The step of {candidate.name}, term by term",
        TERMS,
        predicted.terms,
        look="words",
        below=f"Together {predicted.seconds * 1e3:,.3f} ms. A device holds {_classes(candidate)}: "
        f"{human_bytes(candidate.bytes)}.",
    )


def memory_figure(candidates: list[Candidate]) -> Figure:
    """Memory against time, a point for each layout."""

    def draw(axes: "Axes") -> None:
        sizes = [candidate.bytes / 1e9 for candidate in candidates]
        times = [candidate.seconds * 1e3 for candidate in candidates]
        axes.plot(sizes, times, "o", color=colour(0), markersize=4)
        axes.set(xlabel="memory of the fullest device (GB)", ylabel="step time (ms)")
        log_scale(axes, "x", "y")

    return Figure(title="Memory against time", caption="The fastest layouts.", draw=draw)
