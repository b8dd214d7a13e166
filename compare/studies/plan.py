"""`shardpair plan`: which layout, how long a step, will it fit, on a machine that need not be here."""

import re
from pathlib import Path

import msgspec
from msgspec.structs import replace

from compare.contract.request import Platform
from compare.execute.hosts import Launcher
from compare.execute.progress import Reporter
from compare.flags import DEVICES, Hidden, StudiedName, checked_pythons
from compare.judge.ledger import line_up, mismatches
from compare.judge.outcome import Grid, Outcome
from compare.judge.strategy import with_remat_resolved
from compare.plan import tables
from compare.plan.absent import compile_ahead, run_alone, topology_of
from compare.plan.machine import Machine, read_machine, slowed
from compare.plan.search import USABLE, Candidate, search
from compare.show.findings import Findings, table_of
from compare.spec.engines.registry import REFERENCE, side_of
from compare.spec.experiment import Experiment
from compare.studies.this_machine import HERE, machine_here
from compare.study import Study, findings_of
from compare.terminal import human_bytes

BEST, KEPT, SMALLEST = 10, 400, 20
STATE = ("parameters", "optimizer")
"""Classes of memory that are arguments of a step; gradients are temporaries of one."""


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
    link_speed: float = 1.0
    """Bandwidth of all links, times this: 0.1 for ten times slower."""
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
        """The search. Raises ExperimentError: no such machine, nothing is legal, nothing to explain."""
        outcome = super().planned()
        experiment, machine = outcome.experiment, self._machine(outcome.experiment)
        found = search(self.engine, experiment, machine, fixed=self.said.flags)
        plan = tables.Plan(
            machine=machine,
            engine=self.engine,
            candidates=found.fitting[:KEPT],
            fitting=len(found.fitting),
            smallest=found.too_large[:SMALLEST],
            too_large=len(found.too_large),
            explain=self.explain,
        )
        plan = replace(plan, absent=self._absent(plan.chosen(), experiment, machine))
        return replace(outcome, more={"plan": msgspec.to_builtins(plan)}, left_out=found.refused)

    def _machine(self, experiment: Experiment) -> Machine:
        """The one that is asked for; this one is measured. Raises ExperimentError, EnvironmentMissing."""
        here = re.fullmatch(rf"{HERE}(?:x(\d{{1,4}}))?", self.machine)
        if not here:
            return read_machine(self.machine, link_speed=self.link_speed)
        devices, pythons = int(here[1] or DEVICES), checked_pythons(self)
        machine = machine_here(self.engine, experiment, devices, pythons=pythons, anyway=self.anyway)
        return slowed(machine, self.link_speed) if self.link_speed != 1 else machine

    def _absent(
        self, candidate: Candidate, experiment: Experiment, machine: Machine
    ) -> list[tables.AbsentStep]:
        """A layout's step, alone or compiled, if asked for. Raises ExperimentError, EnvironmentMissing."""
        spec, python, steps = candidate.of(experiment), checked_pythons(self)[side_of(self.engine).name], []
        resolved, waits = with_remat_resolved(self.engine, spec), Reporter(quiet=self.quiet).waits
        if self.alone:
            with waits(f"the first rank of {candidate.name}"):
                rank = run_alone(self.engine, spec, python)
            peak = rank.memory.peak
            kinds = dict.fromkeys((*candidate.memory, *(kind for kind, size in peak.bytes.items() if size)))
            flows = [flow for flow in line_up(self.engine, resolved, rank.ledger.rows) if flow.stage == 0]
            step = tables.AbsentStep(
                title=f"The first rank of {candidate.name}, run alone: bytes at its peak",
                flows=flows,
                memory=[(kind, candidate.memory.get(kind), peak.bytes.get(kind)) for kind in kinds],
                below=f"{human_bytes(peak.total)} in {peak.phase}; planned {human_bytes(candidate.bytes)}.",
                problems=[*rank.ledger.problems, *mismatches(self.engine, resolved, flows)],
            )
            steps.append(step)
        if self.compile:
            with waits(f"compiling {candidate.name} for {machine.name}"):
                built = compile_ahead(self.engine, spec, machine, python)
            state = sum(candidate.memory.get(kind, 0.0) for kind in STATE)
            fits = built.peak_bytes <= USABLE * machine.memory_bytes
            below = f"{built.compile_s:.0f} CPU s. {', '.join(map(' '.join, built.versions.items()))}."
            step = tables.AbsentStep(
                title=f"{candidate.name} compiled for {topology_of(machine)}, {built.device}",
                flows=line_up(self.engine, resolved, built.ledger.rows),
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
        plan, experiment = msgspec.convert(outcome.more["plan"], tables.Plan), outcome.experiment
        best, shown = plan.candidates[:BEST], []
        if best:
            title = f"The fastest of {plan.fitting:,} layouts that fit; ms of a step"
            shown.append(table_of(title, tables.LAYOUTS, best))
        if plan.explain:
            shown.append(tables.terms_table(plan, experiment))
        for step in plan.absent:
            memory = table_of(step.title, tables.MEMORY, step.memory, look="words", below=step.below)
            shown += [memory, table_of("What it sends in a step", tables.FLOWS, step.flows)]
        problems = [problem for step in plan.absent for problem in step.problems]
        return findings_of(
            outcome,
            title=f"{outcome.name} for {plan.machine.name}, {plan.engine}",
            sentence=tables.sentence(plan),
            about=[tables.about(plan, experiment)],
            tables=shown,
            figures=[tables.memory_figure(plan.candidates)] if best else [],
            rows=best,
            passed=bool(best) and not problems,
            warnings=problems,
        )
