"""Traces of cases: each case and its reference run the first step once more, and record all places."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from compare.contract.record import MANIFEST
from compare.contract.trace import read_trace, trace_request, why_no_trace
from compare.execute.launch import EngineError
from compare.execute.launchers import Hosts
from compare.execute.progress import Reporter
from compare.judge.outcome import Outcome
from compare.judge.rounding import UNIT
from compare.judge.trace import Trace, first_difference
from compare.judge.verdict import Verdict
from compare.side.ending import STOPPED
from compare.system.tensors import RecordError

if TYPE_CHECKING:
    from compare.run.study import Study

TRACES = "traces"
"""Folder of the traces in the folder of a study; each has the name of its case."""


def with_traces(
    study: "Study",
    outcome: Outcome,
    folder: Path,
    *,
    reporter: Reporter,
    pythons: Mapping[str, str],
    hosts: Hosts,
) -> Outcome:
    """The outcome with a trace in each verdict that needs one, or with the reason why there is none."""

    def trace_of(name: str) -> Trace:
        """Run a case for its trace, unless its folder is there."""
        place, case = folder / TRACES / name, outcome.cases[name]
        if not (place / MANIFEST).is_file():
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(exist_ok=True)
            case = replace(case, request=trace_request(case.request))
            with reporter.waits(f"{name}: tracing the first step") as on_step:
                study.launch(case, place, pythons=pythons, hosts=hosts, on_step=on_step)
        return read_trace(place)

    def traced(verdict: Verdict) -> Verdict:
        cases = [outcome.cases.get(name) for name in (verdict.reference, verdict.candidate)]
        reference, candidate = cases
        if not (reference and candidate):
            return replace(verdict, untraced=f"{verdict.reference} has no trace")
        if whys := [why for case in (reference, candidate) if (why := why_no_trace(case.request))]:
            return replace(verdict, untraced=whys[0])
        try:
            traces = trace_of(verdict.reference), trace_of(verdict.candidate)
            dtypes = (case.experiment.precision.dtype for case in (reference, candidate))
            difference = first_difference(
                *traces, candidate.experiment, dtype=max(dtypes, key=UNIT.__getitem__)
            )
        except (EngineError, RecordError) as error:
            was_stopped = isinstance(error, EngineError) and error.exit_code == STOPPED
            return verdict if was_stopped else replace(verdict, untraced=str(error))
        compiled = candidate.experiment.layout.compile
        on_gpu = candidate.request.platform == "gpu" and candidate.engine == "torch-compiler"
        if compiled != "none" and (compiled != "auto" or on_gpu):
            difference = replace(difference, without=f"layout.compile = {compiled}")
        return replace(verdict, trace=difference)

    def needs_trace(verdict: Verdict) -> bool:
        return study.needs_trace(verdict) and not (verdict.trace or verdict.untraced)

    verdicts = [traced(verdict) if needs_trace(verdict) else verdict for verdict in outcome.verdicts]
    return replace(outcome, verdicts=verdicts)
