"""Fixtures of all tests. Parity runs in float64; nothing here is timed; no process outlives its test."""

import gc
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from compare.execute import launch
from compare.spec.experiment import Experiment, Layout, Model, Precision, Train
from tests.support import processes, quick_xla, warm
from tests.support.grid import Grid

if TYPE_CHECKING:
    from tests.support.ranks import Ranks

quick_xla.use()

CACHING = {"run", "resume", "check", "bench", "profile", "faults", "sweep"}
"""Commands that take --cache_dir."""
SLOW_FIXTURES = {"shardpair", "grid", "ranks", "ranks_apart", "warm_sides"}
"""Fixtures that start engines: `make test-fast` skips the tests that use them."""

# A busy machine may take long over any example: by default hypothesis calls that a failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `slow` what `make test-fast` leaves out."""
    for item in items:
        if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Keep Python's garbage collector from visiting all that has been imported, in every test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    """Note for `no_process_left` whether the test failed."""
    report = yield
    item.stash.setdefault(processes.FAILED, False)
    item.stash[processes.FAILED] |= report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def no_process_left_at_the_end() -> Generator[None]:
    """Nothing of ours lives on after the last test, wherever it has gone. Set up first, so it comes last."""
    yield
    warm.end()
    if left := processes.end_all(at_the_end=True):
        pytest.fail(f"left behind by the whole session, and now ended: {left}")


no_process_left = pytest.fixture(autouse=True)(processes.no_process_left)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compilation cache of a worker. JAX warns of an entry that another process has half written."""
    return str(tmp_path_factory.getbasetemp() / "compiled")


@pytest.fixture(scope="session")
def grid(shared_folder: Path, cache_dir: str) -> Grid:
    """Every engine under the layouts that many tests read, trained as they are asked for."""
    return Grid(shared_folder / "grid", Shardpair(shared_folder / "grid", cache_dir, warm.python()))


@pytest.fixture
def default_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's own flags: a test's programs are compiled as a user's are, not as quickly as can be."""
    if os.environ.get("XLA_FLAGS") == quick_xla.QUICK:
        monkeypatch.delenv("XLA_FLAGS")


@pytest.fixture(scope="session")
def tiny() -> Experiment:
    """An experiment that takes a second."""
    return Experiment(
        model=Model(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=True),
        train=Train(max_iters=3, batch_size=4),
        precision=Precision(dtype="float64"),
        layout=Layout(bucket_mb=0.01),
    )


class Shardpair:
    """Runs the command as a person would, in a folder of its own."""

    def __init__(self, folder: Path, cache_dir: str, python: str):
        self.folder = folder
        self.cache_dir = cache_dir
        self.python = python

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess:
        """Run `shardpair ARGUMENTS`; never raises for an exit code."""
        return processes.run(self.command(*arguments), cwd=self.folder)

    def command(self, *arguments: str) -> list[str]:
        """The command line, with the tests' own cache where the command takes one."""
        caching = ["--cache_dir", self.cache_dir] if arguments[0] in CACHING else []
        return [self.python, "-m", "compare", *arguments, *caching]


@pytest.fixture
def shardpair(tmp_path: Path, cache_dir: str) -> Shardpair:
    return Shardpair(tmp_path, cache_dir, warm.python())


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which the harness starts a process."""

    def refuse(*arguments: object, **options: object) -> None:
        pytest.fail(f"a process was started: {arguments}")

    monkeypatch.setattr(launch.subprocess, "Popen", refuse)


@pytest.fixture
def warm_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the sides of a study in this process as forks, as the fixture `shardpair` does."""
    monkeypatch.setattr(sys, "executable", warm.python())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Generator["Ranks"]:
    """Four gloo ranks for the tests of a file that are marked `@on_ranks`."""
    from tests.support.ranks import Ranks  # imports PyTorch, which is not everywhere where jaxpar is tested

    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def ranks_apart(tmp_path_factory: pytest.TempPathFactory) -> Generator["Ranks"]:
    """Eight processes for the tests of a file that are marked `@on_ranks_apart`."""
    from tests.support.ranks import Ranks

    ranks = Ranks(tmp_path_factory.mktemp("ranks"), count=8, joins=False)
    yield ranks
    ranks.end()
