"""One verb for each row of the grid: the same public function in the four files, used by the engine."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERBS = {
    "data_parallel": "synchronize_gradients",
    "fully_sharded": "shard_parameters",
    "tensor_parallel": "split_layers",
    "pipeline_parallel": "run_pipeline",
}
ENGINES = ("jaxpar/compiler", "jaxpar/manual", "torchpar/manual", "torchpar/library")
CELLS = [(engine, row) for engine in ENGINES for row in VERBS]
Definition = ast.FunctionDef | ast.ClassDef


def definitions(engine: str) -> dict[str, list[Definition]]:
    """Functions, methods and classes of an engine's files, by name."""
    found: dict[str, list[Definition]] = {}
    for path in (ROOT / engine).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Definition):
                found.setdefault(node.name, []).append(node)
    return found


def reached(start: str, by_name: dict[str, list[Definition]]) -> set[str]:
    """Names of definitions that one refers to, and that those refer to, and so on."""
    names, left = {start}, [start]
    while left:
        for definition in by_name[left.pop()]:
            nodes = list(ast.walk(definition))
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            left += (used & set(by_name)) - names
            names |= used & set(by_name)
    return names


@functools.cache
def used_by(engine: str) -> set[str]:
    """Names of an engine's definitions that its `parallelize` needs."""
    return reached("parallelize", definitions(engine))


@pytest.mark.parametrize(("engine", "row"), CELLS)
def test_every_cell_defines_its_verb_and_its_engine_uses_it(engine, row):
    tree = ast.parse((ROOT / engine / f"{row}.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert VERBS[row] in functions
    function = functions[VERBS[row]]
    assert ast.get_docstring(function)
    assert VERBS[row] in used_by(engine)


def test_a_verb_that_no_engine_uses_is_noticed():
    unused = ast.parse("def parallelize(): work()\ndef work(): pass\ndef run_pipeline(): work()")
    by_name: dict[str, list[Definition]] = {n.name: [n] for n in unused.body if isinstance(n, Definition)}
    assert reached("parallelize", by_name) == {"parallelize", "work"}
