"""One report of a test for each phase, from the reports of all its workers."""

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from compare.system.signals import describe_exit
from compare.system.workers import Answer, Outcome, Workers, blamed_of
from torchpar.plugin.session import has_failed

FRAME_OF_PYTEST = re.compile(
    r'^  File "(?:[^"]*/(?:_pytest|pluggy|torchpar/plugin)/[^"]*|<string>)", line .*\n', re.M
)
Reports = dict[int, list[dict[str, Any]]]
"""Reports by worker, as pytest serializes them."""
LONGEST = 150
"""Characters of the error of a rank that is not to blame."""


def merge(
    item: pytest.Item, answers: Sequence[Answer], workers: Workers, outputs: Sequence[str], timeout_s: float
) -> list[pytest.TestReport]:
    """The reports of a test: the failure of the worker to blame, and the output of all workers."""
    blamed, noun = blamed_of(answers), workers.noun
    by_worker = {answer.worker: _reports(answer) for answer in answers if isinstance(answer.value, tuple)}
    if blamed and blamed.worker not in by_worker:
        main = failure(item, workers.describe(answers, timeout_s=timeout_s))
        reports = [main]
    else:
        chosen = _failing(by_worker, blamed.outcome, answers) if blamed else _skipping(by_worker)
        reports = [_read(item, data) for data in by_worker[chosen]]
        main = next((report for report in reports if report.outcome != "passed"), reports[-1])
        if blamed and len(answers) > 1:
            _name_worker(main, f"{noun} {chosen} of {len(answers)}")
    for report in reports:
        report.sections = []
    if blamed and len(answers) > 1:
        states = [f"{noun} {answer.worker}: {_state(answer)}" for answer in answers]
        main.sections.append((f"All {noun}s" if noun == "rank" else "All processes", "\n".join(states)))
    for worker, theirs in by_worker.items():
        main.sections += [(f"{title} ({noun} {worker})", text) for title, text in theirs[-1]["sections"]]
    shown = [FRAME_OF_PYTEST.sub("", text) for text in outputs]
    main.sections += [(f"Captured stdout, stderr ({noun} {n})", text) for n, text in enumerate(shown) if text]
    return reports


def failure(item: pytest.Item, text: str) -> pytest.TestReport:
    """The report of a failure outside of the test itself."""

    def fail() -> NoReturn:
        pytest.fail(text, pytrace=False)

    call = pytest.CallInfo.from_call(fail, when="call")
    return item.ihook.pytest_runtest_makereport(item=item, call=call)


def _reports(answer: Answer) -> list[dict[str, Any]]:
    reports, _ = answer.value
    return reports


def _failing(by_worker: Reports, outcome: Outcome, answers: Sequence[Answer]) -> int:
    """The first worker with this outcome, if possible with an expected failure."""
    failed = [answer.worker for answer in answers if answer.outcome is outcome and answer.worker in by_worker]
    expected = [n for n in failed if any("wasxfail" in report for report in by_worker[n])]
    return min(expected or failed)


def _skipping(by_worker: Reports) -> int:
    """The first worker that skipped the test; otherwise the first worker."""
    skips = [n for n, reports in by_worker.items() if any(r["outcome"] == "skipped" for r in reports)]
    return min(skips or by_worker)


def _read(item: pytest.Item, data: dict[str, Any]) -> pytest.TestReport:
    data = data | {"nodeid": item.nodeid, "location": item.location}
    return item.config.hook.pytest_report_from_serializable(config=item.config, data=data)


def _name_worker(report: pytest.TestReport, name: str) -> None:
    """Put the name of a worker in front of the message, or of the cause that the side found."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(report.longrepr, str):
        report.longrepr = f"{name}: {report.longrepr}"
    elif crash:
        crash.message = f"{name}: {getattr(report, 'cause', '') or crash.message}"


def _state(answer: Answer) -> str:
    """The end of a test in one worker, in a few words."""
    if answer.outcome is Outcome.SILENT:
        return "no answer; it was ended"
    if isinstance(answer.value, int):
        return describe_exit(answer.value)
    if not isinstance(answer.value, tuple):
        return str(answer.value)
    failed = [report for report in _reports(answer) if has_failed(report)]
    if not failed:
        return "passed"
    message = failed[0]["longrepr"]
    if isinstance(message, dict) and message["reprcrash"]:
        message = message["reprcrash"]["message"].partition("\n")[0]
    return f"failed: {failed[0]['cause'] or str(message)[:LONGEST]}"
