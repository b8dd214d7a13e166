"""The loop that runs every study: round by round, case by case, and saved after each."""

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from compare.checkpoint.description import CHECKPOINTS, checkpoints_in
from compare.execute.launch import EngineError
from compare.execute.progress import Reporter
from compare.judge.outcome import Outcome, save, with_case
from compare.side.ending import STOPPED
from compare.side.run_lock import lock_folder
from compare.system.tensors import RecordError

if TYPE_CHECKING:
    from compare.run.study import Study

MOST_FAILURES = 2
"""Of a case: the first may be bad luck, and is tried again in the next round."""


def run_missing(study: "Study", outcome: Outcome, folder: Path) -> Outcome:
    """Run what an outcome still lacks, in a folder whose lock is held; it is saved after each case.

    A case that does not finish is told and noted, and the others still run.

    Raises:
        EngineError: nothing has finished, or somebody asked an engine to end.
        KeyboardInterrupt: Ctrl-C. Every process was ended, and what is finished is saved.
    """
    reporter, errors, failed = Reporter(quiet=study.quiet), [], Counter[str]()
    rounds = range(1, outcome.rounds + 1)
    several = outcome.rounds > 1
    places = {(n, name): f"round {n}, {name}" if several else name for n in rounds for name in outcome.cases}
    reporter.start({place: outcome.cases[name].request for (_, name), place in places.items()})
    save(outcome, folder)
    try:
        for number in rounds:
            if not outcome.missing(number):
                continue
            outcome = study.before(outcome, number)
            for name in study.order(outcome, number):
                case, place = outcome.cases[name], folder / places[number, name]
                lost = study.needs_reference and case.against in outcome.failures
                if lost or failed[name] == MOST_FAILURES:
                    continue
                try:
                    _clear(place)
                    with reporter.engine(place.name) as tell:
                        value, record = study.measured(name, case, place, number, tell)
                    outcome = with_case(outcome, name, value, record, folder, number=number)
                    if not study.keeps_records:
                        shutil.rmtree(place, ignore_errors=True)
                except (EngineError, RecordError) as error:
                    if isinstance(error, RecordError):
                        why = f"{name}: it left a record that cannot be read: {error}"
                        error = EngineError(why, exit_code=1)
                    errors.append(error)
                    failed[name] += 1
                    reporter.failed(error)
                    outcome = replace(outcome, failures=outcome.failures | {name: str(error)})
                save(outcome, folder)
                if errors and errors[-1].exit_code == STOPPED:  # whoever asked wants the machine
                    is_saved = checkpoints_in(place / CHECKPOINTS)
                    again = f"shardpair resume {folder}" if is_saved else outcome.how_to_go_on(folder)
                    raise EngineError(f"{errors[-1]}: `{again}` goes on", exit_code=STOPPED)
        if outcome.cases and not outcome.finished:
            raise EngineError("; ".join(map(str, errors)), exit_code=errors[0].exit_code, log=errors[0].log)
        outcome = study.after(outcome, folder)
    except KeyboardInterrupt:
        rest = f"Kept: {outcome.progress}. `{outcome.how_to_go_on(folder)}` runs the rest"
        raise KeyboardInterrupt(f"interrupted; every process was ended. {rest}") from None
    save(outcome, folder)
    return outcome


def _clear(place: Path) -> None:
    """Make room for a case; what an unfinished one saved of its training is set aside."""
    if place.is_symlink():
        why = f"{place} is a link: nothing is trained, or removed, outside of {place.parent}"
        raise EngineError(why, exit_code=1)
    if (place / CHECKPOINTS).exists():
        with lock_folder(place):
            names = (place.with_name(f"{place.name}.unfinished-{number}") for number in range(1, 1000))
            place.rename(next(path for path in names if not path.exists()))
    shutil.rmtree(place, ignore_errors=True)
