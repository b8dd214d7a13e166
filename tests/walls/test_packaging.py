"""An installed package holds what its code reads: templates, experiments, machines, recorded numbers."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["compare", "jaxpar", "torchpar"])
def test_data_files_are_packaged(package):
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [path for path in (ROOT / package).rglob("*") if path.is_file()]
    others = {path for path in files if path.suffix not in (".py", ".pyc")}
    packaged = {path for pattern in patterns[package] for path in (ROOT / package).glob(pattern)}
    assert others <= packaged, sorted(others - packaged)
    assert ROOT / package / "py.typed" in packaged
    assert all(any((ROOT / package).glob(pattern)) for pattern in patterns[package])
