"""pytest plugin: `@pytest.mark.ranks(4)` and `@pytest.mark.devices(8)`.

A marked test runs in worker processes, once in each, and has one result. pytest loads this file in every run,
so it imports neither a framework nor `compare`: `torchpar.plugin.pool` does, for the first marked test.
"""

import builtins
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from torchpar.plugin.marks import MARKS, Asked, asked_by

if TYPE_CHECKING:
    from torchpar.plugin.pool import Pool

TIMEOUT_S = 120.0
WORKER = "shardpair-worker"
"""The name of the plugin in a worker."""
POOL = pytest.StashKey["Pool"]()
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardpair", "tests on ranks and devices (shardpair)")
    group.addoption(
        "--ranks-platform",
        choices=("cpu", "gpu"),
        default="cpu",
        help="where tests with the marks ranks and devices run: cpu (gloo, virtual devices) or gpu (NCCL)",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        metavar="SECONDS",
        help=f"seconds for a test on ranks or devices (default: ini ranks_timeout, or {TIMEOUT_S:g})",
    )
    parser.addini("ranks_timeout", "seconds that a test on ranks or devices may take", default=str(TIMEOUT_S))


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKS.values():
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test in its workers."""
    if item.config.pluginmanager.has_plugin(WORKER):
        return None
    if pool := item.config.stash.get(POOL, None):
        pool.keep_only(item.path)
    if not any(item.get_closest_marker(kind) for kind in MARKS):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item) -> list[pytest.TestReport]:
    """Run a test in its workers. Returns its reports."""
    reports: list[pytest.TestReport] = []
    call = pytest.CallInfo.from_call(
        lambda: reports.extend(_run(item)), when="call", reraise=(pytest.exit.Exception, KeyboardInterrupt)
    )
    return reports or [item.ihook.pytest_runtest_makereport(item=item, call=call)]


def _run(item: pytest.Item) -> list[pytest.TestReport]:
    asked = _or_fail(lambda: asked_by(item), ValueError)
    assert asked
    pool = _or_fail(lambda: _pool_of(item.config), ImportError)
    from compare.system.workers import WorkerError, blamed_of
    from torchpar.plugin import reports

    timeout_s = (
        asked.timeout_s
        or item.config.getoption("ranks_timeout")
        or float(item.config.getini("ranks_timeout"))
    )
    group = pool.group_of(item, asked)
    try:
        answers, members = _or_fail(
            lambda: pool.run(item, _following(item, asked), asked, timeout_s),
            ImportError, WorkerError, ChildProcessError,
        )  # fmt: skip
        merged = reports.merge(item, answers, members.workers, members.new_output(), timeout_s)
    except BaseException:  # Ctrl-C and time-outs, too: workers that are still busy are of no more use
        pool.end_group(group)
        raise
    if blamed_of(answers):
        pool.end_group(group, grace_s=1.0)
    _warn(item, answers)
    return merged


def _or_fail(function: Callable[[], T], *errors: type[Exception]) -> T:
    """The result of a function. Some errors fail the test with their message, without a traceback."""
    try:
        return function()
    except errors as error:
        message = str(error)
    pytest.fail(message, pytrace=False)


def _pool_of(config: pytest.Config) -> "Pool":
    """The workers of this session. Raises ImportError: another module hides `compare`."""
    if POOL not in config.stash:
        from torchpar import require_compare

        require_compare()
        from torchpar.plugin.pool import Pool

        config.stash[POOL] = Pool(config)
    return config.stash[POOL]


def _following(item: pytest.Item, asked: Asked) -> str:
    """The next test of the same workers, for which they keep fixtures; '' for none."""
    items = item.session.items
    place = next((place for place, other in enumerate(items) if other is item), len(items))
    for other in items[place + 1 :]:
        if other.path == item.path:
            try:
                theirs = asked_by(other)
            except ValueError:
                continue
            if theirs and theirs[:2] == asked[:2] and theirs.backend == asked.backend:
                return other.nodeid
    return ""


def _warn(item: pytest.Item, answers: Sequence[Any]) -> None:
    """Show the warnings of the first worker."""
    first = answers[0].value
    for text, name, file, line in first[1] if isinstance(first, tuple) else ():
        category = getattr(builtins, name, None)
        message = text if category else f"{name}: {text}"
        warning = warnings.WarningMessage(message, category or UserWarning, file, line)
        item.config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": warning, "when": "runtest", "nodeid": item.nodeid, "location": None}
        )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if pool := session.config.stash.get(POOL, None):
        pool.end()


def _place(request: pytest.FixtureRequest, *kinds: str) -> tuple[Any, Asked]:
    """The result of the side's `join` in this worker, and the mark. Fails without such a mark."""
    asked = asked_by(request.node)
    if not asked or asked.kind not in kinds:
        marks = " or ".join(f"@pytest.mark.{kind}(N)" for kind in kinds)
        pytest.fail(f"{request.fixturename}: mark the test with {marks}", pytrace=False)
    from torchpar.plugin.session import PLACE

    return request.config.stash[PLACE], asked


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The number of this rank."""
    return _place(request, "ranks")[0].rank


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks."""
    return _place(request, "ranks")[0].world_size


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Any:
    """The `torch.device` of this rank."""
    return _place(request, "ranks")[0].device


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """The mesh of the mark: a `DeviceMesh` on ranks, a `jax.sharding.Mesh` on devices."""
    place, asked = _place(request, *MARKS)
    return place.mesh(asked.mesh, asked.axis_types)
