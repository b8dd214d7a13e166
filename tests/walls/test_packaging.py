"""An installed package holds what its code reads: templates, experiments, machines, recorded numbers."""

import os
import subprocess
import sys
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


HIDDEN = {
    "torchpar": "-c import torchpar; torchpar.ledger()",
    "jaxpar": "-c import jaxpar; jaxpar.ledger(print, mesh=None)",
    "command": "-m torchpar.command list",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_other_module_named_compare_is_named(tmp_path, name):
    """A user's compare.py comes first on the path. It is not executed."""
    other = tmp_path / "compare.py"
    other.write_text("print('executed')")
    option, _, code = HIDDEN[name].partition(" ")
    words = [code] if option == "-c" else code.split()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = [sys.executable, option, *words]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    *traceback, last = done.stderr.splitlines()
    assert f"{other} hides shardpair's package `compare`: rename it" in last
    assert (done.returncode, done.stdout) == ((1, "") if traceback else (2, ""))
    assert bool(traceback) == (name != "command")
