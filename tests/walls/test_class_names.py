"""One idea for each name of a class: a name in two rooms (folders) of the product is in a list here."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("compare", "jaxpar", "torchpar")
COMMANDS = ("compare/commands", "compare/studies")
ON_BOTH_SIDES = {
    "Block",
    "ColumnParallelLinear",
    "Dropout",
    "GPT",
    "MLP",
    "RowParallelLinear",
    "Run",
    "Stage",
    "StepProfiler",
    "VocabParallelEmbedding",
}
"""One idea in JAX and in PyTorch."""
OF_ENGINES_AND_GUARDS = {
    "DataParallel",
    "FSDP",
    "FlatGradients",
    "FlatParameters",
    "PipelineParallel",
    "ShardedOptimizer",
    "Unit",
}
"""One wrapper in several engines, or a lesson and its guard."""
OF_TABLES = {
    "Cell": "of the matrix, and of a lesson's table",
    "Column": "of a table, and of a lesson's page",
    "Row": "of the one table that is shown, and of the studies and lessons that fill it",
    "Lesson": "a file of the grid: its lines of code, and its page",
}
"""Names of `compare` for one thing, with what it belongs to."""


def sources() -> dict[str, str]:
    """The product's files: path -> source."""
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def shared_names(of: Mapping[str, str]) -> dict[str, set[str]]:
    """Public classes defined in two rooms or more: name -> rooms.

    A command or study is called as users type it, and so is its file: it may share its name.
    """
    rooms = defaultdict(set)
    for path, source in of.items():
        room, _, file = path.rpartition("/")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                is_command = room in COMMANDS and node.name.lower() == file.removesuffix(".py")
                rooms[node.name] |= set() if is_command else {room}
    return {name: found for name, found in rooms.items() if len(found) > 1}


def names_of_two_ideas(of: Mapping[str, str]) -> dict[str, set[str]]:
    """`shared_names` that no list allows; the first two lists allow nothing in `compare`."""
    return {
        name: rooms
        for name, rooms in shared_names(of).items()
        if name not in OF_TABLES
        and (
            name not in ON_BOTH_SIDES | OF_ENGINES_AND_GUARDS
            or any(room.split("/")[0] == "compare" for room in rooms)
        )
    }


def test_a_class_name_has_one_idea():
    assert not names_of_two_ideas(sources())


def test_the_lists_allow_no_more_than_they_must():
    assert ON_BOTH_SIDES | OF_ENGINES_AND_GUARDS | OF_TABLES.keys() == shared_names(sources()).keys()


def test_a_name_of_two_ideas_is_noticed():
    planted = {
        "torchpar/measure/ledger.py": "class Place:\n    pass\n",
        "compare/contract/progress.py": "class Place:\n    pass\n",
        "torchpar/state.py": "class Run:\n    pass\n",
        "compare/judge/diff.py": "if True:\n    class Run:\n        pass\n",
        "compare/commands/profile.py": "class Profile:\n    pass\nclass Phase:\n    pass\n",
        "compare/judge/profile.py": "class Profile:\n    pass\nclass Phase:\n    pass\n",
        "compare/studies/buckets.py": "class Buckets:\n    pass\n",
        "torchpar/manual/buckets.py": "class Buckets:\n    pass\n",
        "jaxpar/model.py": "class GPT:\n    pass\nclass _Cache:\n    pass\n",
        "torchpar/model.py": "class GPT:\n    pass\n",
        "torchpar/guards/units.py": "class _Cache:\n    pass\n",
    }
    assert names_of_two_ideas(planted) == {
        "Place": {"torchpar/measure", "compare/contract"},
        "Run": {"torchpar", "compare/judge"},
        "Phase": {"compare/commands", "compare/judge"},
    }
