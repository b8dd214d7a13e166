"""An option and fixtures of a project."""

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--size", type=int, default=1)


@pytest.fixture(scope="module")
def process():
    yield os.getpid()
    print("torn down")


@pytest.fixture
def size(request):
    return request.config.getoption("size")
