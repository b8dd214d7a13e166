"""Time cases against each other: fresh processes, in rounds whose order rotates, saved after each process."""

import datetime
import platform as host
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from compare.contract.data import open_corpus
from compare.contract.engines.registry import REFERENCE, side_of
from compare.contract.experiment import Experiment, ExperimentError
from compare.contract.host.facts import cores, cpu_model
from compare.contract.host.run_lock import lock_folder
from compare.contract.record import Record, RecordError, Request, Step
from compare.contract.timing import Timing
from compare.execute.ceiling import measure_ceiling
from compare.execute.launch import (
    EngineError,
    EnvironmentMissing,
    Prepared,
    freeze_data,
    launch,
    prepare,
    require_devices,
)
from compare.execute.load import busy_cores, require_idle
from compare.execute.machine import memory_bytes
from compare.execute.paths import create_run_dir
from compare.execute.progress import Reporter
from compare.execute.source import git_state
from compare.judge.acceptance import objections
from compare.judge.bench import (
    BenchCase,
    BenchResult,
    FailedLaunch,
    Machine,
    circumstances_of,
    measured,
    read_bench,
    save,
)
from compare.judge.bench_rows import baseline_of
from compare.studies.bench_cases import Choice, bench_cases, rotated
from compare.studies.memory_estimate import require_memory
from compare.studies.paired_run import Interrupted, Settings


class BenchInterrupted(Interrupted):
    """Ctrl-C in a bench, whose finished rounds are in `folder`."""

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


def plan_bench(
    name: str,
    experiment: Experiment,
    choice: Choice,
    *,
    timing: Timing,
    rounds: int,
    baseline: str,
    anyway: bool,
    settings: Settings,
    left_out: Mapping[str, str] | None = None,
) -> BenchResult:
    """A bench before anything is started: its cases, and what is left out.

    Args:
        name: for people.
        experiment: with the user's overrides.
        choice: engines, layouts, sizes and variants.
        timing: of each process.
        rounds: how often each case is timed.
        baseline: see `BenchResult.baseline`; '' for the reference engine, or the first if that is none.
        anyway: time on a busy machine, too.
        settings: how it will run.
        left_out: engines that are not installed, and what they lack.

    Raises:
        ExperimentError, EnvironmentMissing: a field, a preset, a baseline or a number that cannot work, more
            devices or memory than there are.
    """
    if rounds < 1:
        raise ExperimentError(f"--rounds {rounds} must be at least 1")
    if timing.window < 1 or timing.windows < 1:
        raise ExperimentError(f"--window {timing.window} and --windows {timing.windows} must be at least 1")
    platform = settings.platform
    cases, refused = bench_cases(experiment, choice, steps=timing.steps, platform=platform)
    for case in cases:
        require_devices(case.experiment, platform)
        require_memory(case.engine, case.experiment, platform=platform)
    commit, dirty = git_state()
    result = BenchResult(
        name=name,
        experiment=experiment,
        platform=platform,
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=Machine(
            system=f"{host.system()} {host.machine()}",
            cpu_model=cpu_model(),
            cores=cores(),
            memory_bytes=memory_bytes(),
        ),
        git_commit=commit,
        git_dirty=dirty,
        rounds=rounds,
        timing=timing,
        baseline=baseline or _default_baseline(cases),
        anyway=anyway,
        is_cached=bool(settings.cache_dir),
        cases=cases,
        left_out={**(left_out or {}), **refused},
    )
    if why := result.left_out.get(baseline):
        raise EnvironmentMissing(f"--baseline {baseline}: {why}")
    if not any(baseline_of(result, case) for case in cases):
        there = dict.fromkeys(f"{case.engine}.{case.layout}" for case in cases)
        raise ExperimentError(
            f"--baseline {baseline}: no such case; give an engine that is timed, or one with its layout "
            f"(there are {', '.join(there)})"
        )
    return result


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
            _with_ceilings(planned, settings), corpus_sha256=prepared.corpus_sha256
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


def _with_ceilings(planned: BenchResult, settings: Settings) -> BenchResult:
    """The bench with the fastest products of its sides, or the reason why there are none."""
    ceilings, left_out = {}, dict(planned.left_out)
    for case in {case.products: case for case in planned.cases}.values():
        side = side_of(case.engine).name
        try:
            ceilings[case.products] = measure_ceiling(
                side,
                planned.platform,
                case.experiment.precision.product_dtype,
                settings.pythons.get(side, sys.executable),
            )
        except EnvironmentMissing as error:
            left_out[f"ceiling of {case.products}"] = str(error)
    return msgspec.structs.replace(planned, ceilings=ceilings, left_out=left_out)


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


def _default_baseline(cases: list[BenchCase]) -> str:
    engines = list(dict.fromkeys(case.engine for case in cases))
    return REFERENCE if REFERENCE in engines else engines[0]


def _place(number: int, case: BenchCase) -> str:
    """Folder of one process while it runs, and its name in the progress."""
    return f"round {number}, {case.name}"


def _interrupted(result: BenchResult, folder: Path) -> str:
    return (
        f"interrupted; every process was ended. Kept: {result.finished_rounds} of {result.rounds} rounds, "
        f"{len(result.measurements)} processes. `shardpair bench --continue {folder}` runs the rest"
    )
