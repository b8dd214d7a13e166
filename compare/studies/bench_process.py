"""One process of a bench: launched, held to its request, reduced to its figures; and the sides' ceilings."""

import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from compare.contract.engines.registry import side_of
from compare.contract.record import Record, Step
from compare.contract.request import Request
from compare.contract.tensors import RecordError
from compare.execute.ceiling import measure_ceiling
from compare.execute.launch import EngineError, EnvironmentMissing, Prepared, launch
from compare.execute.load import LoadBeside
from compare.execute.progress import Reporter
from compare.judge.acceptance import objections
from compare.judge.bench import BenchCase, BenchResult, FailedLaunch, circumstances_of, measured
from compare.studies.cases import Settings


def with_ceilings(result: BenchResult, settings: Settings) -> BenchResult:
    """The bench with the fastest products of its sides, measured once more, or the reason why there are none.

    A machine that was lent to somebody else for a second says nothing of its ceiling: the fastest of all
    rounds counts.
    """
    ceilings, left_out = dict(result.ceilings), dict(result.left_out)
    for case in {case.products: case for case in result.cases}.values():
        products, side = case.products, side_of(case.engine).name
        if _ceiling_of(products) in left_out:
            continue
        try:
            found = measure_ceiling(
                side,
                result.platform,
                case.experiment.precision.product_dtype,
                settings.pythons.get(side, sys.executable),
            )
        except EnvironmentMissing as error:
            left_out[_ceiling_of(products)] = str(error)
            continue
        ceilings[products] = max(ceilings.get(products, found), found, key=lambda one: one.flops_per_s)
    return msgspec.structs.replace(result, ceilings=ceilings, left_out=left_out)


def _ceiling_of(products: str) -> str:
    return f"ceiling of {products}"


def measure(
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
    beside = LoadBeside()
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
    measurement = measured(
        record,
        case=case,
        number=number,
        start_up_s=start_up_s,
        timing=result.timing,
        others_cores=beside.cores(),
    )
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


def request_for(case: BenchCase, result: BenchResult, prepared: Prepared, settings: Settings) -> Request:
    return Request(
        engine=case.engine,
        experiment=msgspec.structs.replace(case.experiment, data=prepared.experiment.data),
        platform=result.platform,
        corpus_sha256=prepared.corpus_sha256,
        timeout_s=settings.timeout_s,
        cache_dir=settings.cache_dir,
        timing=result.timing,
    )
