"""The bucket study: data parallelism's step over bucket sizes, and an all-reduce fitted beside it."""

import math
import shutil
from pathlib import Path

import msgspec

from compare.contract.collective_bench import OURS
from compare.contract.timing import Timing
from compare.execute.launch import EngineError, require_devices
from compare.execute.load import busy_cores
from compare.judge.bench import BenchCase, BenchResult
from compare.judge.bucket_study import ALONE, BUCKETED, mb_text
from compare.judge.closed_forms.buckets import bucket_sizes
from compare.judge.collective_fit import Fit
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.studies.bench import plan_bench
from compare.studies.bench_cases import Choice
from compare.studies.cases import Settings, with_layout
from compare.studies.collectives import (
    RESULT,
    Order,
    read_bench,
    requests_of,
    run_requests,
    sizes_between,
)
from compare.studies.memory_estimate import require_memory
from compare.studies.presets import spread

OTHERS = ("flat", "naive", "overlapped")
STEPS_OF_TEN = (1.0, 2.5, 5.0)
MOST_BUCKETS = 50
SMALLEST_SIZE, LARGEST_SIZE = 2**10, 2**22
"""Bytes between which an all-reduce is timed at least, for its fit."""
COLLECTIVES = "collectives"


def default_bucket_mb(experiment: Experiment) -> tuple[float, ...]:
    """Round numbers of megabytes, of which the gradients fill 2 to `MOST_BUCKETS`, each in another way."""
    itemsize = storage_dtype(experiment).itemsize
    whole = parameter_count(experiment.model) * itemsize / 1e6
    tens = [10.0**power for power in range(-3, math.ceil(math.log10(whole)) + 1)]
    sizes = [round(step * ten, 6) for ten in tens for step in STEPS_OF_TEN]
    fitting = [size for size in sizes if whole / MOST_BUCKETS <= size <= whole / 2]
    different = {
        tuple(bucket_sizes(experiment.model, limit=size * 1e6, itemsize=itemsize)): size
        for size in reversed(fitting)  # of several that make the same buckets, the smallest
    }
    return tuple(sorted(different.values())) or (max(whole, 0.001),)


def plan_study(
    name: str,
    experiment: Experiment,
    *,
    devices: int,
    bucket_mb: tuple[float, ...],
    timing: Timing,
    rounds: int,
    anyway: bool,
    settings: Settings,
) -> BenchResult:
    """A bench of the study's cases, in one block, whose rounds rotate; nothing is started.

    Args:
        name: for people.
        experiment: with the user's overrides; its layout is replaced.
        devices: of data parallelism.
        bucket_mb: limits of a bucket; none for `default_bucket_mb`.
        timing, rounds, anyway, settings: as for `plan_bench`.

    Raises:
        ExperimentError, EnvironmentMissing: what cannot work.
    """
    if devices < 2:
        raise ExperimentError(f"--devices {devices}: there is nothing to reduce on fewer than 2")
    if len(set(bucket_mb)) < len(bucket_mb):
        raise ExperimentError(f"--bucket_mb {' '.join(f'{mb:g}' for mb in bucket_mb)}: give each once")
    single = spread(edited(experiment, {"train": {"max_iters": timing.steps}}), "single")
    if single.train.batch_size % devices:
        raise ExperimentError(
            f"train.batch_size = {single.train.batch_size} is not divisible by --devices {devices}: change "
            f"one of them"
        )
    share = revalidate(edited(single, {"train": {"batch_size": single.train.batch_size // devices}}))
    reduced = with_layout(single, dp_replicate=devices)
    ways = [(sync, with_layout(reduced, gradient_sync=sync)) for sync in OTHERS]
    ways += [
        (mb_text(mb), with_layout(reduced, gradient_sync=BUCKETED, bucket_mb=mb))
        for mb in sorted(bucket_mb or default_bucket_mb(experiment))
    ]
    cases = [
        BenchCase(engine=REFERENCE, layout=f"ddp-{devices}", variant=variant, experiment=whole)
        for variant, whole in [*ways, (ALONE, share)]  # the first is what others' losses are held to
    ]
    for case in cases:
        require_devices(case.experiment, settings.platform)
        require_memory(case.engine, case.experiment, platform=settings.platform)
    planned = plan_bench(
        name,
        single,
        Choice(engines=(REFERENCE,)),
        timing=timing,
        rounds=rounds,
        baseline=REFERENCE,
        anyway=anyway,
        settings=settings,
    )
    return msgspec.structs.replace(planned, experiment=experiment, cases=cases)


def fitted_all_reduce(folder: Path, result: BenchResult, *, settings: Settings, quiet: bool) -> Fit:
    """Time our all-reduce on this machine, once a study, up to the size of all gradients; its fit.

    Args:
        folder: of the study; the times are kept in it.
        result: of the study's bench.
        settings, quiet: how to run.

    Raises:
        EngineError: it did not finish, or gave wrong results.
    """
    place = folder / COLLECTIVES
    experiment = next(case.experiment for case in result.cases if case.variant != ALONE)
    devices = experiment.layout.devices
    gradient_bytes = parameter_count(experiment.model) * storage_dtype(experiment).itemsize
    if not (place / RESULT).is_file() or not read_bench(place).passed:
        shutil.rmtree(place, ignore_errors=True)  # what an interrupted study has left
        order = Order(
            kinds=("all_reduce",),
            implementations=(OURS,),
            sizes=sizes_between(SMALLEST_SIZE, max(LARGEST_SIZE, gradient_bytes), 4),
            ranks=(devices,),
            platform=settings.platform,
            timeout_s=settings.timeout_s,
        )
        requests, left_out = requests_of(order)
        run_requests(
            requests,
            left_out,
            command="",
            run_dir=str(place),
            busy=busy_cores(),
            pythons=settings.pythons,
            quiet=quiet,
        )
    return kept_fit(folder)


def kept_fit(folder: Path) -> Fit:
    """The fit of a study's all-reduce.

    Raises:
        RecordError: it was not timed.
        EngineError: it did not finish, or gave wrong results.
    """
    bench = read_bench(folder / COLLECTIVES)
    if not bench.passed or not bench.fits:
        raise EngineError(f"all_reduce: {bench.sentence()}", exit_code=1)
    return bench.fits[0]
