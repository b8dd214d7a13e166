"""Time cases against each other: fresh processes, in rounds whose order rotates, saved after each process."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from compare.contract.data import open_corpus
from compare.contract.experiment import ExperimentError
from compare.contract.host.run_lock import lock_folder
from compare.contract.record import Record, RecordError, Request, Step
from compare.execute.launch import (
    EngineError,
    Prepared,
    freeze_data,
    launch,
    prepare,
)
from compare.execute.load import busy_cores, require_idle
from compare.execute.paths import create_run_dir
from compare.execute.progress import Reporter
from compare.execute.source import git_state
from compare.judge.acceptance import objections
from compare.judge.bench import (
    BenchCase,
    BenchResult,
    FailedLaunch,
    circumstances_of,
    measured,
    read_bench,
    save,
)
from compare.studies.bench_cases import rotated
from compare.studies.bench_plan import with_ceilings
from compare.studies.paired_run import Interrupted, Settings


class BenchInterrupted(Interrupted):
    """Ctrl-C in a bench, whose finished rounds are in `folder`."""

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


def run_bench(
    planned: BenchResult, *, run_dir: str, settings: Settings, reporter: Reporter
) -> tuple[BenchResult, Path]:
    """Time every case of a plan, round by round.

    A case that fails is told, and tried once more in the next round; the others go on.

    Args:
        planned: from `plan_bench`.
        run_dir: folder of the results, which must not exist; '' names one after the bench.
        settings: how to run.
        reporter: told of the progress.

    Returns:
        The outcome, and the folder it is saved in.

    Raises:
        ExperimentError, EnvironmentMissing: bad data, or a busy machine; nothing was started.
        BenchInterrupted: Ctrl-C. What was measured is saved; `continue_bench` goes on.
    """
    busy = busy_cores()
    require_idle(busy, anyway=planned.anyway)
    folder = create_run_dir(planned.name, run_dir)
    with lock_folder(folder):
        prepared = prepare(planned.experiment, folder)
        result = msgspec.structs.replace(
            with_ceilings(planned, settings), corpus_sha256=prepared.corpus_sha256
        )
        save(result, folder)
        return _run(result, prepared, folder, settings=settings, reporter=reporter, busy=busy), folder


def continue_bench(folder: Path, *, anyway: bool, settings: Settings, reporter: Reporter) -> BenchResult:
    """Measure what a bench still lacks, with the same source.

    Args:
        folder: of the bench.
        anyway: time on a busy machine, too, from now on.
        settings, reporter: as for `run_bench`.

    Raises:
        RecordError: the folder holds no bench.
        ExperimentError: it was made by another version of the source: its figures and ours do not mix.
        EnvironmentMissing, BenchInterrupted: as `run_bench`.
    """
    read_bench(folder)  # says what is wrong with a folder that is none
    with lock_folder(folder):
        saved = read_bench(folder)
        commit, dirty = git_state()
        if (saved.git_commit, saved.git_dirty) != (commit, dirty):
            raise ExperimentError(
                f"{folder} was timed with {saved.git_commit[:12] or 'another version'}, and this is "
                f"{commit[:12]}: figures of two versions do not mix; start a new bench"
            )
        frozen = freeze_data(saved.experiment, folder)
        prepared = Prepared(experiment=frozen, folder=folder, corpus_sha256=open_corpus(frozen).sha256)
        if prepared.corpus_sha256 != saved.corpus_sha256:
            raise ExperimentError(f"{folder}: its data has changed since; start a new bench")
        anyway = anyway or saved.anyway
        busy = busy_cores()
        require_idle(busy, anyway=anyway)
        again = msgspec.structs.replace(saved, anyway=anyway)
        return _run(again, prepared, folder, settings=settings, reporter=reporter, busy=busy)


def _run(
    result: BenchResult,
    prepared: Prepared,
    folder: Path,
    *,
    settings: Settings,
    reporter: Reporter,
    busy: float,
) -> BenchResult:
    requests = {case.name: _request(case, result, prepared, settings) for case in result.cases}
    places = {
        _place(number, case): requests[case.name]
        for number in range(1, result.rounds + 1)
        for case in rotated(result.missing(number), number)
    }
    reporter.start(places, folder)
    try:
        for number in range(1, result.rounds + 1):
            if not result.missing(number):
                continue
            if number > 1:
                busy = busy_cores()
            result = msgspec.structs.replace(result, busy_cores=[*result.busy_cores, busy])
            for case in rotated(result.missing(number), number):
                place = _place(number, case)
                result = _measure(
                    result,
                    number,
                    case,
                    requests[case.name],
                    folder / place,
                    settings=settings,
                    reporter=reporter,
                )
                save(result, folder)
    except KeyboardInterrupt:
        raise BenchInterrupted(_interrupted(result, folder), folder) from None
    return result


def _measure(
    result: BenchResult,
    number: int,
    case: BenchCase,
    request: Request,
    place: Path,
    *,
    settings: Settings,
    reporter: Reporter,
) -> BenchResult:
    """The result with one more measurement, or one more failure, whose folder is kept."""
    shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
    try:
        record, start_up_s = _timed(request, place, settings.pythons, reporter)
    except KeyboardInterrupt:
        shutil.rmtree(place, ignore_errors=True)
        raise
    except (EngineError, RecordError) as error:
        unreadable = EngineError(f"{case.engine}: {error}", exit_code=1)
        failure = error if isinstance(error, EngineError) else unreadable
        reporter.failed(failure)
        failures = [*result.failures, FailedLaunch(round=number, case=case.name, why=str(failure))]
        return msgspec.structs.replace(result, failures=failures)
    measurement = measured(record, case=case, number=number, start_up_s=start_up_s, timing=result.timing)
    shutil.rmtree(place)
    return msgspec.structs.replace(
        result,
        measurements=[*result.measurements, measurement],
        circumstances=result.circumstances | {case.name: circumstances_of(record)},
    )


def _timed(
    request: Request, place: Path, pythons: Mapping[str, str], reporter: Reporter
) -> tuple[Record, float]:
    """Record of one process, and seconds from its start to its first step's record.

    Raises:
        EngineError: it failed, or did something else than was asked.
        RecordError: it left a record that cannot be read.
    """
    begun, first_s = time.monotonic(), 0.0
    with reporter.engine(place.name) as tell:

        def on_step(step: Step) -> None:
            nonlocal first_s
            first_s = first_s or time.monotonic() - begun
            tell(step)

        record = launch(request, place, pythons=pythons, on_step=on_step)
    timing = request.timing
    wrong = objections(record)
    if timing and len(record.manifest.windows) != timing.windows:
        wrong.append(f"it timed {len(record.manifest.windows)} of {timing.windows} windows")
    if wrong:
        raise EngineError(f"{request.engine}: {'; '.join(wrong)}", exit_code=1)
    return record, first_s


def _request(case: BenchCase, result: BenchResult, prepared: Prepared, settings: Settings) -> Request:
    return Request(
        engine=case.engine,
        experiment=msgspec.structs.replace(case.experiment, data=prepared.experiment.data),
        platform=result.platform,
        corpus_sha256=prepared.corpus_sha256,
        timeout_s=settings.timeout_s,
        cache_dir=settings.cache_dir,
        timing=result.timing,
    )


def _place(number: int, case: BenchCase) -> str:
    """Folder of one process while it runs, and its name in the progress."""
    return f"round {number}, {case.name}"


def _interrupted(result: BenchResult, folder: Path) -> str:
    return (
        f"interrupted; every process was ended. Kept: {result.finished_rounds} of {result.rounds} rounds, "
        f"{len(result.measurements)} processes. `shardpair bench --continue {folder}` runs the rest"
    )
