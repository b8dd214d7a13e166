"""An option and fixtures of a project."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--size", type=int, default=1)


@pytest.fixture(scope="module")
def kept():
    """An object for all tests of a file, in one process."""
    return object()


@pytest.fixture
def size(request):
    return request.config.getoption("size")
