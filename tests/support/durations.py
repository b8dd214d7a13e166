"""Seconds of each test when the suite was last recorded, `tests/durations.json`: they tell which are slow.

`make durations` records them anew. A test that has become slow since, or is new, is named when a run ends.
"""

import functools
import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "durations.json"
QUICK_S = 0.5
"""Tests that took less are not in the file, and belong to `make test-fast`."""
NOTICED_S = 5.0  # of one that is not: ten times as much, for a busy machine


def name_of(nodeid: str) -> str:
    """`test_file::test_function`, without folder and parameters: `tests/host/test_a.py::test_b[1]`."""
    path, *names = nodeid.partition("[")[0].split("::")
    return "::".join((Path(path).stem, *names))


@functools.cache
def recorded() -> dict[str, float]:
    """Name of a test that is not quick -> seconds of the longest of its cases."""
    return json.loads(FILE.read_text())


@functools.cache
def slow_files() -> frozenset[str]:
    """Files, without folder and suffix, that have a test which is not quick."""
    return frozenset(name.partition("::")[0] for name in recorded())


def is_slow(nodeid: str) -> bool:
    """True for a test that took long; of a side, for all tests of its file, which share what one compiles."""
    path = Path(nodeid.partition("::")[0])
    of_a_side = not {"jaxpar", "torchpar"}.isdisjoint(path.parts)
    return name_of(nodeid) in recorded() or (of_a_side and path.stem in slow_files())


class Durations:
    """Adds up what a session's tests take, to record it or to name those that nobody knew to be slow.

    Args:
        is_kept: record it.
    """

    def __init__(self, *, is_kept: bool):
        self.is_kept = is_kept
        self.seconds: Counter[str] = Counter()
        self.known: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add set-up, call and tear-down."""
        self.seconds[report.nodeid] += report.duration
        if "slow" in report.keywords:
            self.known.add(report.nodeid)

    def longest(self) -> dict[str, float]:
        """Name of a test -> seconds of the longest of its cases."""
        found: dict[str, float] = {}
        for nodeid, seconds in self.seconds.items():
            found[name_of(nodeid)] = max(seconds, found.get(name_of(nodeid), 0.0))
        return found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the file anew, or name what is slow and not in it."""
        if self.is_kept:
            found = recorded() | self.longest()
            slow = {name: round(seconds, 1) for name, seconds in sorted(found.items()) if seconds >= QUICK_S}
            FILE.write_text(json.dumps(slow, indent=0) + "\n")
            return
        for nodeid in sorted(self.seconds.keys() - self.known):
            if self.seconds[nodeid] >= NOTICED_S:
                took = f"{nodeid} took {self.seconds[nodeid]:.0f} s"
                terminalreporter.write_line(f"{took}: make it quick, or `make durations` marks it slow")
