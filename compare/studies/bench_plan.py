"""The plan of a bench, before anything of it is timed: its cases, its baseline, the ceilings of its sides."""

import datetime
import platform as host
import sys
from collections.abc import Mapping

import msgspec

from compare.contract.engines.registry import REFERENCE, side_of
from compare.contract.experiment import Experiment, ExperimentError
from compare.contract.host.facts import cores, cpu_model
from compare.contract.timing import Timing
from compare.execute.ceiling import measure_ceiling
from compare.execute.launch import EnvironmentMissing, require_devices
from compare.execute.machine import memory_bytes
from compare.execute.source import git_state
from compare.judge.bench import BenchCase, BenchResult, Machine
from compare.judge.bench_rows import baseline_of
from compare.studies.bench_cases import Choice, bench_cases
from compare.studies.memory_estimate import require_memory
from compare.studies.paired_run import Settings


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


def with_ceilings(planned: BenchResult, settings: Settings) -> BenchResult:
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


def _default_baseline(cases: list[BenchCase]) -> str:
    engines = list(dict.fromkeys(case.engine for case in cases))
    return REFERENCE if REFERENCE in engines else engines[0]
