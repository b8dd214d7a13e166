"""Imports that are allowed, read from the syntax of every file; each lesson calls its own collectives."""

import ast
import functools
import graphlib
import sys
from pathlib import Path

from compare.setup.lessons import FOLDERS

ROOT = Path(__file__).parents[2]
JAX_WORLD = {"jax", "jaxlib", "flax", "optax", "orbax"}
TORCH_WORLD = {"torch"}
SIDES = {"jaxpar", "torchpar"}
SHARED = ("system", "spec", "numerics", "formats", "pipeline", "checkpoint", "contract", "side")
"""Folders of `compare` that the sides may import, the lowest first."""
ABOVE = (
    *("terminal", "text", "parser", "theory", "judge", "execute"),
    *("show", "setup", "flags", "run", "commands", "api", "cli"),
)
"""The other folders and files of `compare`, the lowest first."""
STRATEGIES = {"data_parallel", "fully_sharded", "tensor_parallel", "pipeline_parallel"}
PARALLEL = {"mesh", "collectives", "distributed", "sharding", "shard_map", "manual", "compiler", "library"}
CALLS = {
    "data_parallel": {"all_reduce"},
    "fully_sharded": {"all_gather", "reduce_scatter"},
    "pipeline_parallel": {"send", "receive"},
}
"""Collectives that the file of a torch-manual strategy calls itself, here without `start_`."""


@functools.cache
def imports(path: Path, *, at_once: bool = False) -> set[str]:
    """Full names of the modules that a file imports, wherever in it, or when it is imported."""
    names, tree = set(), ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def roots(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {name.split(".")[0] for name in imports(path)}


def folders_of_compare(path: Path) -> set[str]:
    """Folders of `compare` that a file imports from."""
    parts = [name.split(".") for name in imports(path)]
    return {part[1] for part in parts if part[0] == "compare" and len(part) > 1}


def files(folder: str) -> list[Path]:
    """The Python files of a package; there must be some."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, folder
    return paths


def test_compare_imports_no_framework():
    for path in files("compare"):
        assert not roots(path) & (JAX_WORLD | TORCH_WORLD | SIDES), path


def test_shared_folders_import_few_libraries():
    libraries = sys.stdlib_module_names | {"numpy", "msgspec", "safetensors", "psutil", "tiktoken", "compare"}
    for path in (path for folder in SHARED for path in files(f"compare/{folder}")):
        assert roots(path) <= libraries, path


def test_imports_go_down():
    """A folder of `compare` imports itself and lower ones."""
    rooms = (*SHARED, *ABOVE)
    for path in files("compare"):
        room = path.relative_to(ROOT / "compare").parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            assert folders_of_compare(path) <= set(rooms[: rooms.index(room) + 1]), path


def test_any_module_can_be_imported_first():
    """A cycle of imports works or fails by the module that a program imports first."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files("compare")
    }
    graph = {}
    for name, path in paths.items():
        parts = [found.split(".") for found in imports(path, at_once=True)]
        needed = {".".join(part[:size]) for part in parts for size in range(1, len(part) + 1)}
        graph[name] = {found for found in needed & paths.keys() if not f"{name}.".startswith(f"{found}.")}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


def test_sides_import_no_other_side():
    for side, forbidden in (("jaxpar", TORCH_WORLD | {"torchpar"}), ("torchpar", JAX_WORLD | {"jaxpar"})):
        for path in files(side):
            assert not roots(path) & forbidden, path
            program = {"__main__"} if path.name == "command.py" else set()
            assert folders_of_compare(path) <= {*SHARED, *program}, path


def test_plugin_imports_little():
    """pytest loads the plugin in every run; a worker imports its framework by name."""
    for path in files("torchpar/plugin"):
        libraries = sys.stdlib_module_names | {"pytest", "compare", "torchpar"}
        assert roots(path) <= libraries, path
        assert folders_of_compare(path) <= {"system"}, path
    plugin = ROOT / "torchpar" / "plugin" / "hooks.py"
    at_once = {name.split(".")[0] for name in imports(plugin, at_once=True)}
    assert at_once <= sys.stdlib_module_names | {"pytest", "torchpar"}


def test_strategies_do_not_import_each_other():
    for path in (path for folder in FOLDERS.values() for path in files(folder)):
        if path.stem in STRATEGIES:
            others = {part for name in imports(path) for part in name.split(".")} & STRATEGIES
            assert others <= {path.stem}, path


def test_model_imports_nothing_parallel():
    for path in (ROOT / side / f"{part}.py" for side in SIDES for part in ("model", "mlp")):
        assert not {part for name in imports(path) for part in name.split(".")} & PARALLEL, path


def test_manual_imports_no_torch_distributed():
    for path in files("torchpar/manual"):
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def calls(source: str) -> set[str]:
    """Names of the functions and methods that a file calls, without `start_`."""
    nodes = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {getattr(node, "attr", getattr(node, "id", "")).removeprefix("start_") for node in nodes}


def test_a_strategy_calls_its_own_collectives():
    for strategy, collectives in CALLS.items():
        source = (ROOT / "torchpar" / "manual" / f"{strategy}.py").read_text()
        assert collectives <= calls(source), strategy
    assert calls("axis.start_all_reduce(x); send(y)") == {"all_reduce", "send"}
