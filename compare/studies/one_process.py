"""One process of a study: launched, held to its request, reduced to its figures; and the sides' ceilings."""

import math
import shutil
import sys
import time
from pathlib import Path

import msgspec

from compare.contract.record import Record, Step
from compare.contract.request import Request
from compare.contract.timing import Timing
from compare.execute.ceiling import measure_ceiling
from compare.execute.launch import EngineError, EnvironmentMissing, Prepared, launch
from compare.execute.load import LoadBeside
from compare.execute.progress import Reporter
from compare.judge.ladder import objections_by_itself
from compare.judge.timed_outcome import HowItRan, TimedCase, TimedOutcome, how_it_ran, measured
from compare.spec.engines.registry import side_of
from compare.studies.cases import Settings


class SeenSteps:
    """When the steps of a process were there, in seconds since its start, by the clock of the harness."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._at: list[float] = []

    def step(self) -> None:
        """The next step's record is there."""
        self._at.append(time.monotonic() - self._begun)

    @property
    def first_s(self) -> float:
        """Of the first step's record; 0 before it."""
        return self._at[0] if self._at else 0.0

    def windows_s(self, timing: Timing) -> float:
        """From the record of the last step before the windows to that of the last one in them."""
        last = timing.warmup + timing.window * timing.windows
        return self._at[last - 1] - self._at[timing.warmup - 1]


def with_ceilings(result: TimedOutcome, settings: Settings) -> TimedOutcome:
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
    result: TimedOutcome,
    number: int,
    case: TimedCase,
    request: Request,
    place: Path,
    *,
    settings: Settings,
    reporter: Reporter,
) -> TimedOutcome:
    """The result with one more measurement. Raises EngineError, RecordError: it did not finish as asked."""
    shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
    beside = LoadBeside()
    try:
        record, seen = _timed(request, place, settings, reporter)
        how = _same_way(result.how.get(case.name), how_it_ran(record))
    except KeyboardInterrupt:
        shutil.rmtree(place, ignore_errors=True)
        raise
    measurement = measured(
        record,
        case=case,
        number=number,
        start_up_s=seen.first_s,
        windows_seen_s=seen.windows_s(result.timing_of(case)),
        timing=result.timing_of(case),
        others_cores=beside.cores() if settings.hosts.launcher == "local" else math.nan,
    )
    shutil.rmtree(place)
    return msgspec.structs.replace(
        result,
        measurements=[*result.measurements, measurement],
        how=result.how | {case.name: how},
        circumstances=msgspec.structs.replace(
            result.circumstances, versions=result.circumstances.versions | how.versions
        ),
    )


def _timed(request: Request, place: Path, settings: Settings, reporter: Reporter) -> tuple[Record, SeenSteps]:
    """Record of one process, and when its steps were there.

    Raises:
        EngineError: it failed, or did something else than was asked.
        RecordError: it left a record that cannot be read.
    """
    seen = SeenSteps()
    with reporter.engine(place.name) as tell:

        def on_step(step: Step) -> None:
            seen.step()
            tell(step)

        record = launch(request, place, pythons=settings.pythons, hosts=settings.hosts, on_step=on_step)
    timing = request.timing
    wrong = objections_by_itself(record)
    if timing and len(record.manifest.windows) != timing.windows:
        wrong.append(f"it timed {len(record.manifest.windows)} of {timing.windows} windows")
    if wrong:
        raise EngineError(f"{request.engine}: {'; '.join(wrong)}", exit_code=1)
    return record, seen


def _same_way(before: HowItRan | None, now: HowItRan) -> HowItRan:
    """How a case ran now, as in its earlier rounds. Raises EngineError if it ran otherwise."""
    for field in HowItRan.__struct_fields__ if before else ():
        was, found = getattr(before, field), getattr(now, field)
        if was != found:
            raise EngineError(
                f"it ran with {field} = {found}, and in an earlier round with {was}: such figures do not mix",
                exit_code=1,
            )
    return now


def request_for(case: TimedCase, result: TimedOutcome, prepared: Prepared, settings: Settings) -> Request:
    return Request(
        engine=case.engine,
        experiment=msgspec.structs.replace(case.experiment, data=prepared.experiment.data),
        platform=result.platform,
        corpus_sha256=prepared.corpus_sha256,
        timeout_s=settings.timeout_s,
        cache_dir=settings.cache_dir,
        timing=result.timing_of(case),
    )
