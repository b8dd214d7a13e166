"""A pytest session inside of a worker: it collects one file, and runs the tests that the parent names.

So fixtures, parameters, classes and plugins work as in any test. The parent gets the reports as dictionaries.
"""

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import sys
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from compare.system.facts import MissingDevicesError
from compare.system.workers import Outcome, failure_of, messages
from torchpar.plugin.hooks import WORKER
from torchpar.plugin.marks import asked_by

SIDES = {"ranks": "torchpar.testing", "devices": "jaxpar.testing"}
"""The module that makes a worker a rank, or gives it devices, by mark."""
PLACE = pytest.StashKey[Any]()
"""The result of `join` of a side."""
OFF = {
    **dict.fromkeys(("keyword", "markexpr"), ""),
    **dict.fromkeys(("deselect", "xmlpath", "numprocesses", "maxprocesses", "log_file"), None),
    **dict.fromkeys(
        ("lf", "failedfirst", "newfirst", "stepwise", "usepdb", "looponfail", "collectonly"), False
    ),
    **{"pyargs": False, "loadgroup": False},
    **{"maxfail": 0, "dist": "no", "tx": [], "capture": "no"},
}
"""Options that a worker must not have: it runs the tests that the parent names, and writes no files."""
STORING = ("lfplugin", "nfplugin", "stepwiseplugin")
"""Plugins that write which tests there were."""


def options_of(config: pytest.Config) -> dict[str, Any]:
    """The parent's options, for a worker."""
    options = {name: value for name, value in vars(config.option).items() if _is_plain(value)}
    options.pop("file_or_dir", None)
    plugins = [*(config.option.plugins or []), "no:terminal"]
    files = {"inifilename": str(config.inipath) if config.inipath else None, "rootdir": str(config.rootpath)}
    return options | OFF | files | {"plugins": plugins}


def _is_plain(value: object) -> bool:
    """True for a value that JSON can hold."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def run(pipe: Connection, job: dict[str, Any]) -> None:
    """Be a worker of a test file, until the parent hangs up.

    The first message asks whether the file could be collected; each further message names a test.
    """
    sys.path[:] = job["path"]
    os.environ.update(job["environment"])
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # pytest asks where it hangs
    try:
        side = importlib.import_module(SIDES[job["kind"]])
        place = side.join(job)
        config = pytest.Config.fromdictargs(job["options"], [job["file"]])
        config.stash[PLACE] = place
        worker = Worker(pipe, side, place)
        config.pluginmanager.register(worker, WORKER)
        code = config.hook.pytest_cmdline_main(config=config)
        if worker.is_dismissed:
            side.leave(place)
            return
        raise ChildProcessError(f"pytest left with exit code {int(code)}")
    except BaseException as error:
        failure = str(error) if isinstance(error, MissingDevicesError) else failure_of(error)
        answer = pickle.dumps((Outcome.FAILED, failure))
        for _ in messages(pipe):
            pipe.send_bytes(answer)


class Worker:
    """The plugin that takes the place of pytest's loop over tests."""

    def __init__(self, pipe: Connection, side: Any, place: Any):
        self._pipe, self._side, self._place = pipe, side, place
        self._errors: list[str] = []
        self._reports: list[dict[str, Any]] = []
        self._warnings: list[tuple[str, str, str, int]] = []
        self._config: pytest.Config
        self.is_dismissed = False
        """Whether the parent has hung up."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        for name in filter(config.pluginmanager.has_plugin, STORING):
            config.pluginmanager.unregister(name=name)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(f"it cannot import the file:\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that the parent names, one at a time."""
        items = {item.nodeid: item for item in session.items}
        for message in messages(self._pipe):
            nodeid, following = pickle.loads(message)
            if not nodeid:
                self._prepare()
            elif nodeid not in items:
                self._answer(Outcome.FAILED, f"no such test is collected in this process: {nodeid}")
            else:
                self._run(items[nodeid], items.get(following))
        self.is_dismissed = True
        return True

    def _prepare(self) -> None:
        """Answer whether the file is collected and the side is ready."""
        try:
            self._side.prepare(self._place)
            self._side.check(self._place)
        except RuntimeError as error:
            self._errors.append(str(error))
        self._answer(Outcome.FAILED if self._errors else Outcome.DONE, "\n".join(self._errors))

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        self._reports, self._warnings = [], []
        if asked := asked_by(item):
            self._place.begin(asked.mesh)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        failed = [report for report in self._reports if has_failed(report)]
        outcome = Outcome.FAILED if failed else Outcome.DONE
        if failed and all(report.get("is_lost") for report in failed):
            outcome = Outcome.LOST
        try:
            self._side.check(self._place)
        except RuntimeError as error:
            self._answer(Outcome.FAILED, str(error))
        else:
            self._answer(outcome, (self._reports, self._warnings))

    def _answer(self, outcome: Outcome, value: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._pipe.send_bytes(pickle.dumps((outcome, value)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Generator[None, Any, Any]:
        """Note in a report whether its error only reports that another worker is gone, or its cause."""
        report = yield
        report.is_lost = bool(call.excinfo and self._side.is_lost(call.excinfo.value))
        report.cause = self._side.explain(call.excinfo.value) if call.excinfo else ""
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        name = warning_message.category.__name__
        place = warning_message.filename, warning_message.lineno
        self._warnings.append((str(warning_message.message), name, *place))


def has_failed(report: dict[str, Any]) -> bool:
    """True for a report of a failure, expected (xfail) or not."""
    return report["outcome"] == "failed" or (report["outcome"] == "skipped" and "wasxfail" in report)
