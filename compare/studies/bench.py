"""Time cases against each other: fresh processes, in rounds whose order rotates, saved after each process."""

import datetime
import platform as host
from collections.abc import Mapping
from pathlib import Path

import msgspec

from compare.contract.run_lock import lock_folder
from compare.contract.timing import Timing
from compare.execute.launch import EnvironmentMissing, Prepared, freeze_data, prepare, require_devices
from compare.execute.load import busy_cores, require_idle
from compare.execute.machine import memory_bytes
from compare.execute.paths import create_run_dir
from compare.execute.progress import Reporter
from compare.execute.source import git_state, require_same_source
from compare.host.facts import cores, cpu_model
from compare.judge.bench import BenchCase, BenchResult, Machine, read_bench, save
from compare.judge.bench_rows import baseline_of
from compare.numerics.data import open_corpus
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.bench_cases import Choice, bench_cases, rotated
from compare.studies.bench_process import measure, request_for, with_ceilings
from compare.studies.cases import Settings
from compare.studies.fitting import require_sides
from compare.studies.memory_estimate import require_memory
from compare.studies.paired_run import Interrupted


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
    require_sides([case.engine for case in planned.cases], settings.pythons)
    reporter.reads(planned.experiment)
    folder = create_run_dir(planned.name, run_dir)
    with lock_folder(folder):
        prepared = prepare(planned.experiment, folder)
        result = msgspec.structs.replace(planned, corpus_sha256=prepared.corpus_sha256)
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
        require_same_source(folder, saved.git_commit, saved.git_dirty, begun="timed")
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
        raise BenchInterrupted(_interrupted(result, folder), folder) from None
    return result


def _place(number: int, case: BenchCase) -> str:
    """Folder of one process while it runs, and its name in the progress."""
    return f"round {number}, {case.name}".replace("/", "_")  # which a file of data has


def _interrupted(result: BenchResult, folder: Path) -> str:
    return (
        f"interrupted; every process was ended. Kept: {result.finished_rounds} of {result.rounds} rounds, "
        f"{len(result.measurements)} processes. `shardpair bench --continue {folder}` runs the rest"
    )


def _with_load(result: BenchResult, number: int, busy: float) -> BenchResult:
    """The result with what others used before a round, the most if it was begun twice."""
    loads = list(result.busy_cores)
    if number <= len(loads):
        loads[number - 1] = max(loads[number - 1], busy)
    else:
        loads.append(busy)
    return msgspec.structs.replace(result, busy_cores=loads)


def _default_baseline(cases: list[BenchCase]) -> str:
    engines = list(dict.fromkeys(case.engine for case in cases))
    return REFERENCE if REFERENCE in engines else engines[0]
