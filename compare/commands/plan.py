"""`shardpair plan`: which layout, how long a step, will it fit, on a machine that need not be here."""

import itertools
import math
import re
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.request import Platform
from compare.execute.launchers import Launcher
from compare.flags import Hidden, StudiedName
from compare.judge.outcome import Grid, Outcome
from compare.plan.compute import GPT, PARTS, Term, Variant
from compare.plan.machine import Machine, read_machine
from compare.plan.predict import CALIBRATED, LATER, predict, slowdown_by, ways_of
from compare.plan.search import USABLE, Candidate, candidates, folded, search
from compare.run.study import Study
from compare.show.findings import Column, Findings, findings_of, table_of
from compare.spec.axes import PP, TP
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal import human_bytes
from compare.theory.peak import LEAST, MOST

BEST, REASONS = 10, 3
NEAR = CALIBRATED[1]
BELOW = (
    "alike: layouts of the same tp, pp, schedule and recomputation, with other replicas, shards and rows. "
    "No prediction tells the {near} kinds apart that are within {percent:.0%} of the fastest: time them."
)


class Found(Struct, frozen=True, kw_only=True):
    """The fastest layout of each kind that fits, and how many there are."""

    machine: Machine
    candidates: list[Candidate]
    """The fastest first."""
    fitting: int
    """How many layouts of all kinds fit."""
    smallest: list[Candidate]
    """Of those that do not fit."""
    too_large: int
    """How many there were."""
    explained: Candidate
    """That of --explain, else the fastest, or the smallest if none fits."""

    @property
    def times_as_long(self) -> list[float]:
        """Measured steps over such predictions, the least and the most; [] where nobody has held them so."""
        if self.machine.slowdown != 1:
            return [*CALIBRATED]
        return [] if self.machine.platform == "cpu" else [*LATER]

    def sentence(self) -> str:
        """The fastest, how far off it may be, what most of its time is spent on; or that nothing fits."""
        if self.candidates:
            best = self.candidates[0]
            parts = sorted(best.parts.items(), key=lambda item: -item[1])[:3]
            shares = ", ".join(f"{part} {seconds / best.seconds:.0%}" for part, seconds in parts)
            return (
                f"{best.name}: {best.seconds * 1e3:,.1f} ms a step ({self._off(best)}), MFU {best.mfu:.1%}, "
                f"{human_bytes(best.bytes)} a device; {shares}; {self.fitting:,} layouts fit, "
                f"{self.too_large:,} do not"
            )
        best = self.smallest[0]
        return (
            f"none of {self.too_large:,} layouts fits: the smallest, {best.name}, needs "
            f"{human_bytes(best.bytes)}: {_classes(best)}"
        )

    def _off(self, best: Candidate) -> str:
        if not self.times_as_long:
            return "at least: on a CPU much of a step is small operations"
        low, high = self.times_as_long
        span = f"{low * best.seconds * 1e3:,.1f} to {high * best.seconds * 1e3:,.1f} ms"
        if self.machine.slowdown == 1:
            return f"optimistic: published steps took {low:g} to {high:g} times as long, {span}"
        return (
            f"one measured step makes compute take {self.machine.slowdown:.3g} times as long as the chip's "
            f"rates; published ones then took {span}"
        )


class Plan(Study, frozen=True, kw_only=True):
    """Predict step time and memory of every legal layout on a machine that need not be here; nothing runs.

    Bytes that are sent are the textbook's. Compute is a roofline, and optimistic: docs/plan.md holds
    predictions against published tables. A field of the layout that you give stays as it is; all others are
    searched. The sequences of a step stay, too: give a number that the devices divide.

    Try:
      shardpair plan gpt2-350m --train.batch_size 512 --train.gradient_accumulation_steps 1 --machine h100x64
      shardpair plan gpt2-124m --machine h100x8 --measured dp8+rows12+none=120ms
    """

    machine: str = "h100x8"
    """A chip and how many: h100x64, v5e-256; or a TOML file of your own."""
    engine: StudiedName = REFERENCE
    """Whose layouts, whose bytes and whose memory."""
    timed_step: Annotated[str, tyro.conf.arg(name="measured", metavar="LAYOUT=TIME")] = ""
    """A step of this plan that you have timed, fsdp8+rows4+none=412ms: one factor on compute makes it so,
    and all others are predicted with it. `slowdown` in a machine's file says the factor for other plans."""
    shape: Variant = GPT
    explain: str = ""
    """Write out the sum of one layout, term by term: its name, or its place in the table."""

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
        """The search. Raises ExperimentError."""
        outcome = super().planned()
        experiment = outcome.experiment
        machine, fixed = read_machine(self.machine), self.said.flags
        if self.timed_step:
            machine = self._calibrated(experiment, machine)
        layouts = search(self.engine, experiment, machine, fixed=fixed, variant=self.shape)
        kinds = folded(layouts.fitting)
        found = Found(
            machine=machine,
            candidates=kinds,
            fitting=len(layouts.fitting),
            smallest=layouts.too_large[:1],
            too_large=len(layouts.too_large),
            explained=self._explained(kinds, layouts.fitting + layouts.too_large),
        )
        plan = {"plan": found, "refused": layouts.refused}
        reasons = dict(itertools.islice(layouts.refused.items(), REASONS))
        given = [getattr(experiment.layout, axis) for axis in (TP, PP) if axis in fixed]
        shares, sequences = machine.devices // math.prod(given), experiment.sequences_per_step
        if more := -sequences % shares:
            why = f"{sequences} sequences do not divide: {sequences + more} do"
            reasons[f"data parallelism over {shares}"] = why
        return replace(outcome, more=msgspec.to_builtins(plan), left_out=reasons)

    def _calibrated(self, experiment: Experiment, machine: Machine) -> Machine:
        """The machine as the step of --measured says. Raises ExperimentError: no such layout, or no time."""
        name, _, time = self.timed_step.rpartition("=")
        legal = candidates(self.engine, experiment, machine, fixed=self.said.flags, ratio=1)
        layouts = [candidate for candidate in legal if candidate.name == name]
        number = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", time)
        if not layouts or not number:
            raise ExperimentError(
                f"--measured {self.timed_step}: give a layout as the plan names it, and its step: "
                f"fsdp8+rows4+none=412ms"
            )
        seconds = float(number[1]) / (1e3 if number[2] == "ms" else 1)
        spec = layouts[0].of(experiment)
        ways = ways_of(self.engine, spec, self.shape)
        return replace(machine, slowdown=slowdown_by(self.engine, spec, machine, seconds=seconds, **ways))

    def _explained(self, kinds: list[Candidate], layouts: list[Candidate]) -> Candidate:
        """The layout of --explain, which need not fit. Raises ExperimentError: there is none."""
        named = {"": layouts[0]} | {candidate.name: candidate for candidate in layouts}
        named |= {str(place): candidate for place, candidate in enumerate(kinds, 1)}
        if self.explain not in named:
            wrong = f"--explain {self.explain}: give a place from 1 to {len(kinds)}, or the name of a layout"
            raise ExperimentError(wrong)
        return named[self.explain]

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """The best layouts with their parts, and the sum of one if it was asked for."""
        found, experiment = msgspec.convert(outcome.more["plan"], Found), outcome.experiment
        machine, engine, explain = found.machine, outcome.options["engine"], outcome.options["explain"]
        best, one, tables = found.candidates[:BEST], found.explained, []
        if best:
            title = f"The fastest of {found.fitting:,} layouts that fit, one of each kind; ms of a step"
            near = sum(candidate.seconds < NEAR * best[0].seconds for candidate in found.candidates)
            tables.append(table_of(title, LAYOUTS, best, below=BELOW.format(near=near, percent=NEAR - 1)))
        if explain:
            spec, variant = one.of(experiment), msgspec.convert(outcome.options["shape"], Variant)
            terms = predict(engine, spec, machine, **ways_of(engine, spec, variant)).terms
            below = f"Together {one.seconds * 1e3:,.3f} ms. A device holds {_classes(one)}."
            title = f"The step of {one.name}, term by term"
            tables.append(table_of(title, TERMS, terms, look="words", below=below))
        return findings_of(
            outcome,
            title=f"{outcome.name} for {machine.name}, {engine}",
            sentence=found.sentence(),
            about=[
                f"Predicted, not measured. {machine.devices} devices of {human_bytes(machine.memory_bytes)}, "
                f"of which a step may have {USABLE:.0%}; {experiment.sequences_per_step} sequences of "
                f"{experiment.model.block_size} tokens a step. Memory is an estimate, {LEAST:g} to {MOST:g} "
                "times as much as was measured.",
            ],
            tables=tables,
            rows=best,
            value={"times_as_long": found.times_as_long},
            passed=bool(best),
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
    Column[Candidate]("alike", lambda candidate: candidate.alike, ",d"),
    *(
        Column[Candidate](part, lambda candidate, part=part: candidate.parts.get(part, 0.0) * 1e3, ",.1f")
        for part in PARTS
    ),
)


def _classes(candidate: Candidate) -> str:
    return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in candidate.memory.items())
