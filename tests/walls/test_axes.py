"""The mesh axes are declared once: all others ask `compare.spec.axes` for their names and order."""

import ast
import importlib
from pathlib import Path

import pytest

from compare.spec.axes import AXES, BATCH, SPLIT, TP
from compare.spec.experiment import Layout

ROOT = Path(__file__).parents[2]
DECLARED = "compare/spec/axes.py"
NAMES_OF_PRESETS = {
    "compare/studies/presets.py",
    "compare/studies/known_faults.py",
    "compare/studies/memory.py",
    "compare/studies/moves.py",
    "compare/studies/lessons.py",
}
"""Where "tp" and "pp" name a preset: a user's word for a layout, which is no axis."""


def files_with_axis_names() -> set[str]:
    """Every file of the product in which the name of an axis stands as a string."""
    found = set()
    for package in ("compare", "jaxpar", "torchpar"):
        for path in sorted((ROOT / package).rglob("*.py")):
            strings = (
                node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
            )
            if any(node.value in AXES for node in strings):
                found.add(path.relative_to(ROOT).as_posix())
    return found


def test_axis_names_are_strings_only_where_they_are_declared():
    found = files_with_axis_names()
    print(f"\n{len(found)} files have the name of a mesh axis as a string")
    assert found == {DECLARED, *NAMES_OF_PRESETS}


def test_an_axis_is_called_as_its_degree_is_in_the_layout():
    degrees = Layout(**{name: degree for degree, name in enumerate(AXES, start=2)})
    assert list(degrees.axes.items()) == [(name, degree) for degree, name in enumerate(AXES, start=2)]
    assert degrees.devices == 2 * 3 * 4 * 5
    assert degrees.data_parallel == degrees.dp_replicate * degrees.dp_shard


def test_the_mesh_is_laid_out_as_records_and_several_hosts_expect():
    """The outermost axis is the first that crosses hosts."""
    assert AXES == ("dp_replicate", "pp", "dp_shard", "tp")
    assert BATCH == ("dp_replicate", "dp_shard")


@pytest.mark.parametrize("engine", ["compiler", "manual"])
def test_the_tables_of_tensor_parallelism_are_the_contract_s(engine):
    """They stand in the lessons, because they are the lesson."""
    pytest.importorskip("jax")  # and not the module itself: where that is gone the test must fail
    tensor_parallel = importlib.import_module(f"jaxpar.{engine}.tensor_parallel")
    declared = {logical: axis for logical, axis in SPLIT.items() if axis == TP}
    assert declared == tensor_parallel.SPLIT
