"""A test that never ends."""

import pathlib
import time

import pytest


@pytest.mark.devices(2)
def test_hangs(mesh):
    pathlib.Path("started").touch()
    time.sleep(600)
