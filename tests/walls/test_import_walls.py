"""Imports that are allowed, read from the syntax of every file."""

import ast
import sys
from pathlib import Path

import processes
import pytest

from compare.studies.lessons import FOLDERS

ROOT = Path(__file__).parents[2]
JAX_WORLD = {"jax", "jaxlib", "flax", "optax", "orbax"}
TORCH_WORLD = {"torch"}
SIDES = {"jaxpar", "torchpar"}
SHARED = ("host", "spec", "numerics", "pipeline", "checkpoint", "contract")
"""Rooms of `compare` that the sides may import, from the ground up: a room imports those below it."""
STRATEGIES = {"data_parallel", "fully_sharded", "tensor_parallel", "pipeline_parallel"}


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def roots(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {name.split(".")[0] for name in imports(path)}


def rooms_of_compare(path: Path) -> set[str]:
    """Rooms of `compare` that a file imports from."""
    parts = [name.split(".") for name in imports(path)]
    return {part[1] for part in parts if part[0] == "compare" and len(part) > 1}


def files(folder: str) -> list[Path]:
    """The Python files of a package; there must be some."""
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, folder
    return found


@pytest.mark.parametrize("path", files("compare"), ids=str)
def test_compare_imports_no_framework_and_no_side(path):
    assert not roots(path) & (JAX_WORLD | TORCH_WORLD | SIDES)


@pytest.mark.parametrize("room", SHARED)
def test_what_both_sides_share_imports_little_and_only_lower_rooms(room):
    libraries = sys.stdlib_module_names | {"numpy", "msgspec", "safetensors"}
    below = set(SHARED[: SHARED.index(room) + 1])
    for path in files(f"compare/{room}"):
        assert roots(path) <= libraries | {"compare"}, path
        assert rooms_of_compare(path) <= below, path


@pytest.mark.parametrize(
    ("side", "forbidden"), [("jaxpar", TORCH_WORLD | {"torchpar"}), ("torchpar", JAX_WORLD | {"jaxpar"})]
)
def test_sides_import_the_contract_and_their_own_world(side, forbidden):
    for path in files(side):
        assert not roots(path) & forbidden, path
        assert rooms_of_compare(path) <= set(SHARED), path


@pytest.mark.parametrize("folder", sorted(FOLDERS.values()))
def test_strategies_do_not_import_each_other(folder):
    for path in files(folder):
        if path.stem in STRATEGIES:
            others = {part for name in imports(path) for part in name.split(".")} & STRATEGIES
            assert others <= {path.stem}, path


@pytest.mark.parametrize("side", sorted(SIDES))
def test_the_model_does_not_know_that_it_is_parallel(side):
    words = {name for module in imports(ROOT / side / "model.py") for name in module.split(".")}
    assert not words & {
        "mesh",
        "collectives",
        "distributed",
        "sharding",
        "shard_map",
        "manual",
        "compiler",
        "library",
        "dtensors",
    }


def test_only_comm_calls_torch_distributed():
    """Hand-written engines go through `comm/`; the others are PyTorch's own."""
    may = {"collectives.py", "stock_collectives.py", "process_groups.py", "gloo_workers.py", "silence.py"}
    may |= {"dispatcher.py", "ledger.py", "memory.py", "places.py", "marks.py", "work.py"}  # which watch
    theirs = {"library", "library_faults.py", "compiler", "compiler_faults.py", "dtensors.py"}
    for path in files("torchpar"):
        if not theirs & set(path.parts) and path.name not in may:
            assert not any(name.startswith("torch.distributed") for name in imports(path)), path
            assert "torch.distributed" not in path.read_text().replace("`torch.distributed`", ""), path


@pytest.mark.parametrize("entry", ["jaxpar.train", "torchpar.launcher.entry"])
def test_a_run_imports_faults_only_if_it_asks_for_one(entry):
    code = f"import {entry}, sys; print(*(name for name in sys.modules if '.faults' in name))"
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def of_the_command_line(path: Path) -> set[str]:
    """Modules of the command line that a file imports."""
    return {name for name in imports(path) if name.startswith(("compare.commands", "compare.cli"))}


def test_only_the_command_line_imports_its_commands():
    """Studies, flags and `compare.api` lie under it."""
    top = {ROOT / "compare" / "cli.py", ROOT / "compare" / "__main__.py"}
    below = [path for path in files("compare") if path not in top and path.parent.name != "commands"]
    assert ROOT / "compare" / "api.py" in below
    assert {path: found for path in below if (found := of_the_command_line(path))} == {}
    assert of_the_command_line(ROOT / "compare" / "cli.py")  # as a file above it does


def test_compare_is_empty_at_the_top():
    assert (ROOT / "compare" / "__init__.py").read_text() == ""


MARKS_PARTS = ROOT / "torchpar" / "manual" / "megatron" / "split.py"
"""Layers that are split are for any module themselves, and mark their parts for PyTorch's own tools."""


@pytest.mark.parametrize("path", files("torchpar/manual"), ids=str)
def test_a_lesson_imports_no_guard(path):
    if path != MARKS_PARTS:
        assert not any(name.startswith("torchpar.guards") for name in imports(path)), path
