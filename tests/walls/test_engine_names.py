"""Engines and sides are named where they are declared; everything else asks the registry."""

import ast
from pathlib import Path

import pytest

from compare.spec.engines.registry import ENGINES, SIDES

ROOT = Path(__file__).parents[2]
DECLARATIONS = ROOT / "compare" / "spec" / "engines"
OWN_NAMES = {
    ROOT / "compare" / "studies" / "harness_faults.py",  # a record by another engine is one of its faults
}


def names_in(source: str) -> set[str]:
    """Engine and side names that are string literals of their own; docstrings and messages are none."""
    literals = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return literals & (ENGINES.keys() | SIDES.keys())


@pytest.mark.parametrize("package", ["compare", *SIDES])
def test_only_declarations_name_engines(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        if DECLARATIONS not in path.parents and path not in OWN_NAMES:
            assert not names_in(path.read_text()), path


def test_the_check_can_fail():
    assert names_in('"""jax-manual"""\nif engine == "jax-manual":\n    pass\n') == {"jax-manual"}
    assert not names_in('"""The engine jax-manual."""\nraise ValueError("jax-manual has none")\n')
