"""Time the cases of a study: fresh processes, in rounds whose order rotates, saved after each process."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from compare.contract.run_lock import lock_folder
from compare.contract.timing import Timing
from compare.execute.here import here_and_now
from compare.execute.launch import EnvironmentMissing, Prepared, freeze_data, prepare, require_devices
from compare.execute.load import busy_cores, require_idle
from compare.execute.paths import create_run_dir
from compare.execute.progress import Reporter
from compare.execute.source import require_same_source
from compare.judge.bench_rows import baseline_of
from compare.judge.outcome import read_outcome, save
from compare.judge.timed_outcome import TimedCase, TimedOutcome
from compare.numerics.data import open_corpus
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.bench_cases import rotated
from compare.studies.cases import Interrupted, Settings
from compare.studies.fitting import require_sides
from compare.studies.memory_estimate import require_memory
from compare.studies.one_process import measure, request_for, with_ceilings


def plan_rounds(
    study: str,
    name: str,
    experiment: Experiment,
    cases: list[TimedCase],
    *,
    timing: Timing,
    rounds: int,
    anyway: bool,
    settings: Settings,
    baseline: str = "",
    left_out: Mapping[str, str] | None = None,
) -> TimedOutcome:
    """A study before anything is started.

    Args:
        study: the word of its command.
        name: for people.
        experiment: with the user's overrides.
        cases: what is timed.
        timing: of each process.
        rounds: how often each case is timed.
        anyway: time on a busy machine, too.
        settings: how it will run.
        baseline: see `TimedOutcome.baseline`; '' for the reference engine, or the first if that is none.
        left_out: what is no case, and why.

    Raises:
        ExperimentError, EnvironmentMissing: a baseline or a number that cannot work, a case that its engine
            cannot express, more devices or memory than there are.
    """
    if rounds < 1:
        raise ExperimentError(f"--rounds {rounds} must be at least 1")
    if timing.window < 1 or timing.windows < 1:
        raise ExperimentError(f"--window {timing.window} and --windows {timing.windows} must be at least 1")
    for case in cases:
        require_devices(case.experiment, settings.platform, settings.hosts)
        ENGINES[case.engine].require_experiment(case.experiment, platform=settings.platform)
        require_memory(case.engine, case.experiment, platform=settings.platform)
    result = TimedOutcome(
        study=study,
        name=name,
        experiment=experiment,
        platform=settings.platform,
        circumstances=here_and_now(),
        rounds=rounds,
        timing=timing,
        baseline=baseline or _default_baseline(cases),
        anyway=anyway,
        is_cached=bool(settings.cache_dir),
        cases=cases,
        left_out=dict(left_out or {}),
    )
    if why := result.left_out.get(baseline):
        raise EnvironmentMissing(f"--baseline {baseline}: {why}")
    if baseline and not any(baseline_of(result, case) for case in cases):
        there = dict.fromkeys(f"{case.engine}.{case.layout}" for case in cases)
        raise ExperimentError(
            f"--baseline {baseline}: no such case; give an engine that is timed, or one with its layout "
            f"(there are {', '.join(there)})"
        )
    return result


def run_rounds(
    planned: TimedOutcome, *, run_dir: str, settings: Settings, reporter: Reporter
) -> tuple[TimedOutcome, Path]:
    """Time every case of a plan, round by round.

    A case that fails is told, and tried once more in the next round; the others go on.

    Args:
        planned: from `plan_rounds`.
        run_dir: folder of the results, which must not exist; '' names one after the study.
        settings: how to run.
        reporter: told of the progress.

    Returns:
        The outcome, and the folder it is saved in.

    Raises:
        ExperimentError, EnvironmentMissing: bad data, or a busy machine; nothing was started.
        Interrupted: Ctrl-C. What was measured is saved; `continue_rounds` goes on.
    """
    busy = busy_cores()
    require_idle(busy, anyway=planned.anyway)
    require_sides([case.engine for case in planned.cases], settings.pythons)
    reporter.reads(planned.experiment)
    folder = create_run_dir(planned.name, run_dir)
    with lock_folder(folder):
        prepared = prepare(planned.experiment, folder)
        result = msgspec.structs.replace(planned, corpus_sha256=prepared.corpus_sha256)
        save(result, folder)
        return _run(result, prepared, folder, settings=settings, reporter=reporter, busy=busy), folder


def continue_rounds(folder: Path, *, anyway: bool, settings: Settings, reporter: Reporter) -> TimedOutcome:
    """Measure what a study still lacks, with the same source.

    Args:
        folder: of the study.
        anyway: time on a busy machine, too, from now on.
        settings, reporter: as for `run_rounds`.

    Raises:
        RecordError: the folder holds no study.
        ExperimentError: it was made by another version of the source: its figures and ours do not mix.
        EnvironmentMissing, Interrupted: as `run_rounds`.
    """
    read_outcome(folder, TimedOutcome)  # says what is wrong with a folder that is none
    with lock_folder(folder):
        saved = read_outcome(folder, TimedOutcome)
        made = saved.circumstances
        require_same_source(folder, made.git_commit, made.git_dirty, begun="timed")
        frozen = freeze_data(saved.experiment, folder)
        prepared = Prepared(experiment=frozen, folder=folder, corpus_sha256=open_corpus(frozen).sha256)
        if prepared.corpus_sha256 != saved.corpus_sha256:
            raise ExperimentError(f"{folder}: its data has changed since; start a new {saved.study}")
        anyway = anyway or saved.anyway
        busy = busy_cores()
        require_idle(busy, anyway=anyway)
        again = msgspec.structs.replace(saved, anyway=anyway)
        return _run(again, prepared, folder, settings=settings, reporter=reporter, busy=busy)


def _run(
    result: TimedOutcome,
    prepared: Prepared,
    folder: Path,
    *,
    settings: Settings,
    reporter: Reporter,
    busy: float,
) -> TimedOutcome:
    requests = {case.name: request_for(case, result, prepared, settings) for case in result.cases}
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
            result = with_ceilings(_with_load(result, number, busy), settings)
            for case in rotated(result.missing(number), number):
                place = _place(number, case)
                result = measure(
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
        raise Interrupted(_interrupted(result, folder), folder) from None
    return result


def _place(number: int, case: TimedCase) -> str:
    """Folder of one process while it runs, and its name in the progress."""
    return f"round {number}, {case.name}".replace("/", "_")  # which a file of data has


def _interrupted(result: TimedOutcome, folder: Path) -> str:
    return (
        f"interrupted; every process was ended. Kept: {result.progress}, "
        f"{len(result.measurements)} processes. `shardpair {result.study} --continue {folder}` runs the rest"
    )


def _with_load(result: TimedOutcome, number: int, busy: float) -> TimedOutcome:
    """The result with what others used before a round, the most if it was begun twice."""
    loads = list(result.circumstances.busy_cores)
    if number <= len(loads):
        loads[number - 1] = max(loads[number - 1], busy)
    else:
        loads.append(busy)
    now = msgspec.structs.replace(result.circumstances, busy_cores=loads)
    return msgspec.structs.replace(result, circumstances=now)


def _default_baseline(cases: list[TimedCase]) -> str:
    engines = list(dict.fromkeys(case.engine for case in cases))
    return REFERENCE if REFERENCE in engines else engines[0]
