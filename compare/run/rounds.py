"""The loop over the cases of a study, round by round; the outcome is saved after each case."""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from compare.contract.record import Record, Step
from compare.execute import cpu_load
from compare.execute.launch import EngineError
from compare.execute.launchers import Hosts
from compare.execute.progress import Reporter
from compare.judge.outcome import Case, Outcome, save, with_case
from compare.run.continuing import make_room
from compare.run.tracing import with_traces
from compare.side.ending import STOPPED
from compare.system.tensors import RecordError

if TYPE_CHECKING:
    from compare.run.study import Study

MOST_FAILURES = 2
"""Failures of a case after which later rounds skip it."""


def run_missing(
    study: "Study", outcome: Outcome, folder: Path, *, pythons: Mapping[str, str], hosts: Hosts
) -> Outcome:
    """Run the cases that an outcome lacks, in a folder that the caller has locked.

    A failed case is printed and recorded, and the other cases still run.

    Raises:
        EngineError: no case has finished, or an engine was asked to end.
        KeyboardInterrupt: Ctrl-C. Every process was ended, and finished cases are saved.
    """
    reporter, errors, failed = Reporter(quiet=study.quiet), list[EngineError](), Counter[str]()
    rounds = range(1, outcome.rounds + 1)
    several = outcome.rounds > 1
    places = {(n, name): f"round {n}, {name}" if several else name for n in rounds for name in outcome.cases}
    reporter.start({place: outcome.cases[name].request for (_, name), place in places.items()})
    save(outcome, folder)
    try:
        for number in rounds:
            for name in rotate(outcome, number) if several else outcome.missing(number):
                case, place = outcome.cases[name], folder / places[number, name]
                has_no_reference = study.needs_reference and case.against in outcome.failures
                if has_no_reference or failed[name] == MOST_FAILURES:
                    continue
                try:
                    continues = make_room(case.request, place)
                    if continues:
                        reporter.note(f"{place.name} continues from its checkpoint of step {continues.step}")
                    now = replace(case, request=replace(case.request, continues=continues))
                    others = cpu_load.OtherProcesses()
                    with reporter.engine(place.name) as show_step:
                        value, record = _run_case(study, now, place, pythons, hosts, show_step)
                    if hosts.launcher == "local":  # other launchers start no children of ours
                        outcome = cpu_load.with_load(outcome, name, others.cores())
                    outcome = with_case(outcome, name, value, record, folder, number=number)
                    how = {"reporter": reporter, "pythons": pythons, "hosts": hosts}
                    outcome = with_traces(study, outcome, folder, **how)
                    if not study.keeps_records:
                        shutil.rmtree(place, ignore_errors=True)
                except (EngineError, RecordError) as error:
                    if isinstance(error, RecordError):
                        error = EngineError(f"{name}: {error}", exit_code=1)
                    errors.append(error)
                    failed[name] += 1
                    reporter.failed(error)
                    outcome = replace(outcome, failures=outcome.failures | {name: str(error)})
                save(outcome, folder)
                if errors and errors[-1].exit_code == STOPPED:  # the machine is needed: start nothing more
                    again = f"`{outcome.how_to_go_on(folder)}` goes on"
                    raise EngineError(f"{errors[-1]}: {again}", exit_code=STOPPED)
        if outcome.cases and not outcome.finished:
            raise EngineError("; ".join(map(str, errors)), exit_code=errors[0].exit_code, log=errors[0].log)
        outcome = study.end(outcome, folder)
    except KeyboardInterrupt:
        rest = f"Kept: {outcome.progress}. `{outcome.how_to_go_on(folder)}` runs the rest"
        raise KeyboardInterrupt(f"interrupted; every process was ended. {rest}") from None
    save(outcome, folder)
    return outcome


def rotate(outcome: Outcome, number: int) -> list[str]:
    """Cases that a round lacks, counted from 1, in its order: block by block A B C, then B C A, ...

    No case is always first, when the machine is cool, nor always after the same other case. Cases of a block,
    whose ratios count, run close to each other.
    """
    blocks: dict[str, list[str]] = {}
    for name in outcome.missing(number):
        blocks.setdefault(outcome.cases[name].block, []).append(name)
    firsts = [(names, (number - 1) % len(names)) for names in blocks.values()]
    return [name for names, first in firsts for name in names[first:] + names[:first]]


def _run_case(
    study: "Study",
    case: Case,
    place: Path,
    pythons: Mapping[str, str],
    hosts: Hosts,
    show_step: Callable[[Step], None],
) -> tuple[Any, Record]:
    """The value to keep of a case, and its record. Raises EngineError, RecordError."""
    begun, times_s = time.monotonic(), list[float]()

    def on_step(step: Step) -> None:
        times_s.append(time.monotonic() - begun)
        show_step(step)

    record = study.launch(case, place, pythons=pythons, hosts=hosts, on_step=on_step)
    return study.keep(case, record, first_step_after_s=times_s[0]), record
