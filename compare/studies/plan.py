"""`shardpair plan`: which layout, how long a step, will it fit, on a machine that need not be here."""

import re
from pathlib import Path

import msgspec

from compare.contract.ahead_of_time import AheadRequest
from compare.contract.request import Platform
from compare.execute.ahead_of_time import compiled_ahead
from compare.execute.alone import require_alone, run_alone
from compare.execute.hosts import Launcher
from compare.execute.paths import default_cache
from compare.execute.progress import Reporter
from compare.flags.arguments import Hidden, StudiedName
from compare.flags.chosen_layout import DEVICES
from compare.flags.pythons import checked_pythons
from compare.judge.ledger import line_up, mismatches
from compare.judge.outcome import Grid, Outcome
from compare.judge.strategy import with_remat_resolved
from compare.plan.machine import Machine, read_machine, slowed
from compare.plan.outcome import AbsentStep, PlanOutcome, StepAlone, chosen, keep
from compare.plan.search import Candidate, search
from compare.plan.tables import (
    DROPPED,
    about,
    alone_tables,
    columns,
    compiled_tables,
    frontier_figure,
    memory_alone,
    sentence,
    written_out,
)
from compare.plan.target import topology_of
from compare.show.findings import Findings, table_of
from compare.spec.engines.registry import JAX, REFERENCE, side_of
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.this_machine import HERE, machine_of
from compare.study import Study, findings_of

BEST = 10
ALONE_S = COMPILE_S = 3600.0


class Plan(Study, frozen=True, kw_only=True):
    """Predict step time and memory of every legal layout on a machine that need not be here; nothing runs.

    Bytes that are sent, and state at rest, are the closed forms that engines are held to. Compute is a
    roofline; docs/plan.md holds predictions against published tables, and says where they are off. A field
    of the layout that you give stays as it is; all others are searched. The sequences of a step stay, too.

    Try:
      shardpair plan gpt2-350m --machine h100x64
      shardpair plan gpt2-350m --machine h100x64 --layout.tp 8 --explain 1
      shardpair plan gpt2-350m --machine v5e-256 --train.batch_size 512 --train.gradient_accumulation_steps 1
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
    what it sends and keeps against the closed forms. Nothing is computed. For engines of torchpar."""

    compile: bool = False
    """Also compile the best layout, or the explained one, for the chips of --machine, which are not here:
    what XLA sends, waits for and keeps. For engines of jaxpar; takes minutes, and a compiler of 0.7 GB. If
    the plan finds none that fits, the smallest: the plan's memory is a bound, and XLA's is its own."""

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
        experiment = outcome.experiment
        machine = self._machine(experiment)
        found = search(self.engine, experiment, machine, fixed=self.said.flags)
        view = keep(found, experiment=experiment, machine=machine, engine=self.engine, explain=self.explain)
        if self.explain:
            chosen(view)
        if self.alone:
            view = self._with_alone(view)
        if self.compile:
            view = self._with_compiled(view)
        more = {"plan": msgspec.to_builtins(view)}
        return msgspec.structs.replace(outcome, more=more, left_out=view.left_out)

    def _machine(self, experiment: Experiment) -> Machine:
        """The one that is asked for; this one is measured. Raises ExperimentError, EnvironmentMissing."""
        found = re.fullmatch(rf"{HERE}(?:x(\d{{1,4}}))?", self.machine)
        if not found:
            return read_machine(self.machine, link_speed=self.link_speed)
        how = {"pythons": checked_pythons(self), "anyway": self.anyway}
        here = machine_of(HERE, int(found[1] or DEVICES), self.engine, experiment, **how)
        return slowed(here, self.link_speed) if self.link_speed != 1 else here

    def _with_alone(self, outcome: PlanOutcome) -> PlanOutcome:
        """The plan with a step of one rank of a layout. Raises ExperimentError, EnvironmentMissing."""
        one, spec = self._one_of(outcome, "--alone")
        require_alone(self.engine, spec.layout)
        resolved = with_remat_resolved(self.engine, spec)
        python = checked_pythons(self)[side_of(self.engine).name]
        with Reporter(quiet=self.quiet).waits(f"the first rank of {one.name}"):
            found = run_alone(self.engine, spec, python, timeout_s=ALONE_S)
        flows = [flow for flow in line_up(self.engine, resolved, found.rows) if flow.stage == 0]
        kept = StepAlone(layout=one.name, flows=flows, memory=found.memory)
        problems = [*found.problems, *mismatches(self.engine, resolved, flows)]
        return msgspec.structs.replace(outcome, alone=[kept], problems=problems)

    def _with_compiled(self, outcome: PlanOutcome) -> PlanOutcome:
        """The plan with what XLA makes of a layout. Raises ExperimentError, EnvironmentMissing."""
        machine, target = outcome.machine, outcome.machine.target
        side = side_of(self.engine)
        if side.name != JAX.name:
            raise ExperimentError(f"--compile: {self.engine} is of {side.name}: give --alone")
        if not target.is_given:
            raise ExperimentError(f"--compile: {machine.name} has no [target], which names a chip to XLA")
        one, spec = self._one_of(outcome, "--compile")
        shape = {"devices": machine.devices, "inside": machine.devices_inside, "torus": machine.torus}
        topology = topology_of(target, **shape)
        request = AheadRequest(
            engine=self.engine,
            experiment=spec,
            compiler=target.compiler,
            topology=topology,
            target=target.text,
        )
        python, cache = checked_pythons(self)[side.name], default_cache()
        with Reporter(quiet=self.quiet).waits(f"compiling {one.name} for {topology}"):
            found = compiled_ahead(request, python, cache=Path(cache) if cache else None, timeout_s=COMPILE_S)
        flows = line_up(self.engine, with_remat_resolved(self.engine, spec), found.rows)
        kept = AbsentStep(layout=one.name, topology=topology, found=found, flows=flows)
        return msgspec.structs.replace(outcome, absent=[kept], problems=[*outcome.problems, *found.problems])

    def _one_of(self, outcome: PlanOutcome, flag: str) -> tuple[Candidate, Experiment]:
        """The explained layout, or the best one; the smallest if none fits. Raises ExperimentError: none."""
        if not (found := outcome.candidates or outcome.nearest):
            raise ExperimentError(f"{flag}: there is no layout")
        one = chosen(outcome) if self.explain else found[0]
        return one, one.of(outcome.experiment)

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """The best layouts with their parts, what does not fit, and the sum of one if it was asked for."""
        view = msgspec.convert(outcome.more["plan"], PlanOutcome)
        best = view.candidates[:BEST]
        tables = []
        if best:
            title = f"The fastest of {view.fitting:,} layouts that fit; ms of a step"
            tables.append(table_of(title, columns(view), best))
        if view.dropped:
            tables.append(table_of("What does not fit", DROPPED, list(view.dropped.items())))
        if view.explain:
            tables.append(written_out(view, chosen(view)))
        for one in view.alone:
            tables += alone_tables(one, view)
        for one in view.absent:
            tables += compiled_tables(one, view)
        return findings_of(
            outcome,
            title=f"{outcome.name} for {view.machine.name}, {view.engine}",
            sentence=sentence(view),
            about=[about(view)],
            tables=tables,
            figures=[
                *([frontier_figure(view)] if best else []),
                *map(memory_alone, view.alone),
            ],
            rows=best,
            passed=bool(best) and not view.problems,
            warnings=view.problems,
        )
