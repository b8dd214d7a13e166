"""`shardpair plan`: which layout, how long a step, will it fit, on a machine that need not be here."""

import re
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.request import Platform
from compare.execute.hosts import Launcher
from compare.execute.progress import Reporter
from compare.flags import DEVICES, Hidden, StudiedName, checked_pythons
from compare.judge.closed_forms.peak import LEAST, MOST
from compare.judge.ledger import Flow, line_up, mismatches
from compare.judge.outcome import Grid, Outcome
from compare.plan.absent import compile_ahead, run_alone, topology_of
from compare.plan.compute import PARTS, Term
from compare.plan.machine import Machine, read_machine
from compare.plan.predict import predict
from compare.plan.search import USABLE, Candidate, search
from compare.present.outcome import findings_of
from compare.show.figures import Axes, Figure, colour, log_scale
from compare.show.findings import Column, Findings, Table, table_of
from compare.spec.engines.registry import REFERENCE, side_of
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.this_machine import HERE, machine_here
from compare.study import Study
from compare.terminal import human_bytes

BEST, KEPT, SMALLEST = 10, 400, 20
STATE = ("parameters", "optimizer")
"""Classes of memory that are arguments of a step; gradients are temporaries of one."""
Bytes = tuple[str, float | None, float | None]
"""A class of memory, its bytes in the plan, and as a side found them."""


class AbsentStep(Struct, frozen=True, kw_only=True):
    """One layout's step on devices that are not here: what it sends and keeps, as a side found."""

    title: str
    flows: list[Flow]
    memory: list[Bytes]
    below: str
    problems: list[str]
    """What does not fit the layout, or could not be read."""


class Found(Struct, frozen=True, kw_only=True):
    """Layouts that fit, fastest first, and how many do not."""

    machine: Machine
    candidates: list[Candidate]
    """The fastest."""
    fitting: int
    """How many there were."""
    smallest: list[Candidate]
    """The smallest of those that do not fit."""
    too_large: int
    """How many there were."""
    absent: list[AbsentStep] = []

    def chosen(self, explain: str) -> Candidate:
        """The layout of --explain, which need not fit; else the fastest, or the smallest if none fits.

        Raises ExperimentError: none has this name or place.
        """
        layouts = [*self.candidates, *self.smallest]
        named = {"": layouts[0]} | {candidate.name: candidate for candidate in layouts}
        named |= {str(place): candidate for place, candidate in enumerate(self.candidates, 1)}
        if explain not in named:
            wrong = (
                f"--explain {explain}: give a place from 1 to {len(self.candidates)}, or the name of a layout"
            )
            raise ExperimentError(f"{wrong} that is kept")
        return named[explain]

    def sentence(self) -> str:
        """The fastest, and what most of its time is spent on; or that nothing fits."""
        if not self.candidates:
            least = self.smallest[0]
            return (
                f"none of {self.too_large:,} layouts fits: the smallest, {least.name}, needs "
                f"{human_bytes(least.bytes)}: {_classes(least)}"
            )
        best = self.candidates[0]
        parts = sorted(best.parts.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{part} {seconds / best.seconds:.0%}" for part, seconds in parts)
        return (
            f"{best.name}: {best.seconds * 1e3:,.1f} ms a step, MFU {best.mfu:.1%}, "
            f"{human_bytes(best.bytes)} a device; {shares}; {self.fitting:,} layouts fit, "
            f"{self.too_large:,} do not"
        )


class Plan(Study, frozen=True, kw_only=True):
    """Predict step time and memory of every legal layout on a machine that need not be here; nothing runs.

    Bytes that are sent are the textbook's. Compute is a roofline; docs/plan.md holds predictions against
    published tables, and says where they are off. A field of the layout that you give stays as it is; all
    others are searched. The sequences of a step stay, too.

    Try:
      shardpair plan gpt2-350m --machine h100x64
      shardpair plan gpt2-350m --machine h100x64 --layout.tp 8 --explain 1
    """

    machine: str = "h100x8"
    """A chip and how many: h100x64, v5e-256; a TOML file of your own; or here, herex2: this machine's CPU,
    whose products, memory and all-reduce are measured first, in about a minute."""
    engine: StudiedName = REFERENCE
    """Whose layouts, whose bytes and whose memory."""
    anyway: bool = False
    """Measure a busy machine, too, for --machine here."""
    explain: str = ""
    """Write out the sum of one layout, term by term: its name, or its place in the table."""

    alone: bool = False
    """Also run the first rank of the best layout, or of the explained one, here without the others, and hold
    what it sends and keeps against the plan. Nothing is computed. For engines of torchpar."""

    compile: bool = False
    """Also compile the best layout, or the explained one, for the chips of --machine, which are not here:
    what XLA sends and keeps. For engines of jaxpar; takes minutes, and a compiler of 0.7 GB. If the plan
    finds none that fits, the smallest: the plan's memory is an estimate, and XLA's is its own."""

    brief = "which layout, how long a step, will it fit: predicted"
    group = "Read"
    default = "gpt2-124m"

    platform: Hidden[Platform] = "cpu"
    launcher: Hidden[Launcher] = "local"
    hosts: Hidden[int] = 0
    continue_: Hidden[str] = ""
    init_from: Hidden[str] = ""
    timeout_s: Hidden[float] = 600.0
    cache_dir: Hidden[str] = ""
    dry_run: Hidden[bool] = False

    def cases(self, experiment: Experiment) -> Grid:
        """None: nothing runs."""
        return {}, {}

    def planned(self) -> Outcome:
        """The search, on a machine that is read, or measured. Raises ExperimentError, EnvironmentMissing."""
        outcome = super().planned()
        experiment = outcome.experiment
        if here := re.fullmatch(rf"{HERE}(?:x(\d{{1,4}}))?", self.machine):
            devices, pythons = int(here[1] or DEVICES), checked_pythons(self)
            machine = machine_here(self.engine, experiment, devices, pythons=pythons, anyway=self.anyway)
        else:
            machine = read_machine(self.machine)
        layouts = search(self.engine, experiment, machine, fixed=self.said.flags)
        found = Found(
            machine=machine,
            candidates=layouts.fitting[:KEPT],
            fitting=len(layouts.fitting),
            smallest=layouts.too_large[:SMALLEST],
            too_large=len(layouts.too_large),
        )
        absent = self._absent(found.chosen(self.explain), experiment, machine)
        plan = msgspec.to_builtins(replace(found, absent=absent))
        return replace(outcome, more={"plan": plan}, left_out=layouts.refused)

    def _absent(self, candidate: Candidate, experiment: Experiment, machine: Machine) -> list[AbsentStep]:
        """A layout's step, alone or compiled, if asked for. Raises ExperimentError, EnvironmentMissing."""
        spec, python, steps = candidate.of(experiment), checked_pythons(self)[side_of(self.engine).name], []
        waits = Reporter(quiet=self.quiet).waits
        if self.alone:
            with waits(f"the first rank of {candidate.name}"):
                rank = run_alone(self.engine, spec, python)
            peak = rank.memory.peak
            kinds = dict.fromkeys((*candidate.memory, *(kind for kind, size in peak.bytes.items() if size)))
            flows = [flow for flow in line_up(self.engine, spec, rank.ledger.rows) if flow.stage == 0]
            step = AbsentStep(
                title=f"The first rank of {candidate.name}, run alone: bytes at its peak",
                flows=flows,
                memory=[(kind, candidate.memory.get(kind), peak.bytes.get(kind)) for kind in kinds],
                below=f"{human_bytes(peak.total)} in {peak.phase}; planned {human_bytes(candidate.bytes)}.",
                problems=[*rank.ledger.problems, *mismatches(self.engine, spec, flows)],
            )
            steps.append(step)
        if self.compile:
            with waits(f"compiling {candidate.name} for {machine.name}"):
                built = compile_ahead(self.engine, spec, machine, python)
            state = sum(candidate.memory.get(kind, 0.0) for kind in STATE)
            fits = built.peak_bytes <= USABLE * machine.memory_bytes
            below = f"{built.compile_s:.0f} CPU s. {', '.join(map(' '.join, built.versions.items()))}."
            step = AbsentStep(
                title=f"{candidate.name} compiled for {topology_of(machine)}, {built.device}",
                flows=line_up(self.engine, spec, built.ledger.rows),
                memory=[
                    ("parameters and moments", state, built.state_bytes),
                    ("all of a step", candidate.bytes, built.peak_bytes),
                ],
                below=below if fits else f"It does not fit, says XLA. {below}",
                problems=built.ledger.problems,
            )
            steps.append(step)
        return steps

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """The best layouts with their parts, and the sum of one if it was asked for."""
        found, experiment = msgspec.convert(outcome.more["plan"], Found), outcome.experiment
        machine, engine, explain = found.machine, outcome.options["engine"], outcome.options["explain"]
        best, tables = found.candidates[:BEST], []
        if best:
            title = f"The fastest of {found.fitting:,} layouts that fit; ms of a step"
            tables.append(table_of(title, LAYOUTS, best))
        if explain:
            tables.append(terms_table(engine, found.chosen(explain), experiment, machine))
        for step in found.absent:
            memory = table_of(step.title, MEMORY, step.memory, look="words", below=step.below)
            tables += [memory, table_of("What it sends in a step", FLOWS, step.flows)]
        problems = [problem for step in found.absent for problem in step.problems]
        return findings_of(
            outcome,
            title=f"{outcome.name} for {machine.name}, {engine}",
            sentence=found.sentence(),
            about=[
                f"Predicted, not measured. {machine.devices} devices of {human_bytes(machine.memory_bytes)}, "
                f"of which a step may have {USABLE:.0%}; {experiment.sequences_per_step} sequences of "
                f"{experiment.model.block_size} tokens a step. Memory is an estimate, {LEAST:g} to {MOST:g} "
                f"times as much as was measured.",
            ],
            tables=tables,
            figures=[memory_figure(found.candidates)] if best else [],
            rows=best,
            passed=bool(best) and not problems,
            warnings=problems,
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


def _classes(candidate: Candidate) -> str:
    return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in candidate.memory.items())


def terms_table(engine: str, candidate: Candidate, experiment: Experiment, machine: Machine) -> Table:
    """The sum of one layout, term by term."""
    predicted = predict(engine, candidate.of(experiment), machine)
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

    def draw(axes: Axes) -> None:
        sizes = [candidate.bytes / 1e9 for candidate in candidates]
        times = [candidate.seconds * 1e3 for candidate in candidates]
        axes.plot(sizes, times, "o", color=colour(0), markersize=4)
        axes.set(xlabel="memory of the fullest device (GB)", ylabel="step time (ms)")
        log_scale(axes, "x", "y")

    return Figure(title="Memory against time", caption="The fastest layouts.", draw=draw)
