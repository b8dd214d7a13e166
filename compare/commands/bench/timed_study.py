"""A study that times its cases: fresh processes, in rounds whose order rotates."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from compare.commands.bench.agreement import disagreements
from compare.commands.bench.outcome import TimedOutcome, measured, timed
from compare.commands.bench.words import warnings
from compare.contract.record import STEPS, STEPS_PART, Record, Step
from compare.contract.request import Request
from compare.contract.timing import Timing
from compare.execute import load
from compare.execute.launch import EngineError, EnvironmentMissing, launch
from compare.execute.query import measure_ceiling
from compare.flags import hosts_of, pythons_of
from compare.judge.ladder import objections_by_itself
from compare.judge.outcome import Case, Outcome
from compare.run.study import Study
from compare.show.findings import Findings, Table, findings_of
from compare.side.ceiling import CeilingRequest
from compare.spec.engines.registry import side_of
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate

STANDARD = Timing()
STATED, UNHELD_S = 0.75, 0.5
"""Of the time that passes an engine must state this much, but for so many seconds: beside another test an
honest window of 0.09 s was kept waiting for 0.23 s."""


class OnIdle(Study, frozen=True, kw_only=True):
    """A question for a machine that does nothing else. A subclass has a docstring of its own."""

    anyway: bool = False
    """Time on a busy machine, too; the record then says so."""

    def ready(self) -> None:
        """Refuse a busy machine. Raises EnvironmentMissing."""
        load.require_idle(load.busy_cores(), anyway=self.anyway)

    def before(self, outcome: Outcome, number: int) -> Outcome:
        """With what others used before the round, the most if it was begun twice."""
        loads, busy = list(outcome.circumstances.busy_cores), load.busy_cores()
        loads[number - 1 :] = [max([busy, *loads[number - 1 : number]]), *loads[number:]]
        return replace(outcome, circumstances=replace(outcome.circumstances, busy_cores=loads))


class Timed(OnIdle, frozen=True, kw_only=True):
    """A question that is answered by timing cases in rounds. A subclass has a docstring of its own."""

    rounds: int = 5
    """How often each case is timed. From fewer than five rounds no interval can be told."""
    window: int = STANDARD.window
    """Steps of a window, inside of which nothing waits for the devices."""
    windows: int = STANDARD.windows
    """Windows of a process."""

    fixed: ClassVar = {
        "train.max_iters": None,
        "init_from": None,
        "train.eval_interval": 0,
        "checkpoint.every": 0,
    }

    @property
    def timing(self) -> Timing:
        """Of a process's steps."""
        return Timing(window=self.window, windows=self.windows)

    def case(self, engine: str, experiment: Experiment, **place: Any) -> Case:
        """A case to time; `place` has fields of `Case`. Raises ExperimentError: it cannot be."""
        spec = revalidate(edited(experiment, {"train": {"max_iters": self.timing.steps}}))
        return Case(request=Request(engine=engine, experiment=spec, timing=self.timing), **place)

    def asked(self) -> Experiment:
        """The experiment. Raises ExperimentError, before this machine is measured: for no round or step."""
        if min(self.rounds, self.window, self.windows) < 1:
            raise ExperimentError("--rounds, --window and --windows must be at least 1")
        return super().asked()

    def planned(self) -> Outcome:
        """The study before anything starts. Raises ExperimentError for what has no effect, or cannot be."""
        return replace(super().planned(), more={"timing": msgspec.to_builtins(self.timing)})

    def before(self, outcome: Outcome, number: int) -> Outcome:
        """With what others use, and the fastest products of the sides, or why there are none.

        A machine that was lent to somebody else for a second says nothing of its ceiling: the fastest of all
        rounds counts.
        """
        outcome, pythons = super().before(outcome, number), pythons_of(self)
        ceilings, left_out = dict(timed(outcome).ceilings), dict(outcome.left_out)
        for products, case in {case.products: case for case in outcome.cases.values()}.items():
            if (name := f"ceiling of {products}") in left_out:
                continue
            side, dtype = side_of(case.engine).name, case.experiment.precision.product_dtype
            try:
                request = CeilingRequest(dtype=dtype, platform=outcome.platform)
                ceiling = measure_ceiling(side, pythons[side], request)
            except EnvironmentMissing as error:
                left_out[name] = str(error)
                continue
            ceilings[products] = max(ceilings.get(products, ceiling), ceiling, key=lambda of: of.flops_per_s)
        more = outcome.more | {"ceilings": msgspec.to_builtins(ceilings)}
        return replace(outcome, left_out=left_out, more=more)

    def order(self, outcome: Outcome, number: int) -> list[str]:
        """Block by block, and in each block A B C, then B C A, ..."""
        return rotated([outcome.cases[name] for name in outcome.missing(number)], number)

    def measured(
        self, name: str, case: Case, place: Path, number: int, tell: Callable[[Step], None]
    ) -> tuple[Any, Record | None]:
        """One process. Raises EngineError, RecordError: it did not finish as asked."""
        beside, begun, seen, timing = load.LoadBeside(), time.monotonic(), [], case.request.timing
        assert timing
        reads = dict[float, list[Step]]()

        def on_step(step: Step) -> None:
            seen.append(time.monotonic() - begun)
            for path in (place / STEPS_PART, place / STEPS):  # as it is called when the run ends
                with contextlib.suppress(FileNotFoundError):
                    reads.setdefault(path.stat().st_mtime, []).append(step)
                    break
            tell(step)

        hosts = hosts_of(self)
        record = launch(case.request, place, pythons=pythons_of(self), hosts=hosts, on_step=on_step)
        wrong = objections_by_itself(record)
        if len(record.manifest.windows) != timing.windows:
            wrong.append(f"it timed {len(record.manifest.windows)} of {timing.windows} windows")
        wrong += misstated(reads)
        if wrong:
            raise EngineError(f"{name}: {'; '.join(wrong)}", exit_code=1)
        figures = measured(
            record,
            first_seen_s=seen[0],
            timing=timing,
            others_cores=beside.cores() if hosts.launcher == "local" else math.nan,
        )
        return figures, record


def misstated(reads: Mapping[float, Sequence[Step]]) -> list[str]:
    """What is wrong with an engine's clock, given the steps that were read together and when, by the disk's
    clock, the last of them was written.

    Of the first of them nobody saw the begin, and a step that is watched costs more than itself. Between
    windows an engine draws batches, and a disk or another process may keep it waiting.
    """
    timed = [
        (sum(step.step_time_ms for step in steps) / 1e3, at_s - before_s)
        for before_s, (at_s, steps) in zip(reads, list(reads.items())[1:], strict=False)
        if not any(step.instrumented for step in steps)
    ]
    stated_s, passed_s = map(sum, zip(*timed, strict=True)) if timed else (0.0, 0.0)
    if stated_s >= STATED * passed_s - UNHELD_S:
        return []
    return [f"it says that steps took {stated_s:.2f} s that took {passed_s:.2f} s by the disk's clock"]


def rotated(cases: Sequence[Case], number: int) -> list[str]:
    """Names in the order of a round, counted from 1.

    No case is always the first, when the machine is cool, nor always after the same other one; and cases of a
    block, whose ratios count, run close to each other.
    """
    blocks: dict[str, list[str]] = {}
    for case in cases:
        blocks.setdefault(case.block, []).append(case.name)
    firsts = [(names, (number - 1) % len(names)) for names in blocks.values()]
    return [name for names, first in firsts for name in names[first:] + names[:first]]


def timed_findings(view: TimedOutcome, *, sentence: str, tables: Sequence[Table], **more: Any) -> Findings:
    """`findings_of` with what spoils them: they pass if every case did the same work in its time.

    Figures of a case that ran in another way in some rounds do not mix.
    """
    mixed = [
        f"{name} did not run in the same way in all rounds: such figures do not mix"
        for name, rounds in view.measurements.items()
        if any(process.how != next(iter(rounds.values())).how for process in rounds.values())
    ]
    return findings_of(
        view,
        sentence=sentence,
        tables=tables,
        passed=not mixed and not disagreements(view),
        warnings=[*warnings(view), *mixed],
        **more,
    )
