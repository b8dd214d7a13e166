"""Each lesson in its file: a torch-manual strategy calls the collectives that define it, its helpers none.

Read from the syntax. Collectives that only serve any module (agreement on what was used, buffers, the first
values) or the record are no lesson: a helper may call them, and says so by their purpose.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MANUAL, GUARDS = ROOT / "torchpar" / "manual", ROOT / "torchpar" / "guards"
LESSONS = {
    "data_parallel": {"all_reduce"},
    "fully_sharded": {"all_gather", "reduce_scatter", "all_reduce"},
    "sharded_optimizer": {"reduce_scatter_gradients", "unshard"},
    # Megatron's f and g, which are collectives with a derivative: megatron/mappings.py.
    "tensor_parallel": {"copy_to_region", "reduce_from_region"},
    "pipeline_parallel": {"send", "receive"},
}
HELPERS = ("buckets.py", "zero", "pipeline")
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"}
SUPPORT = {"UNUSED", "BUFFERS", "REPLICATE", "RECORD"}


def calls(source: str) -> Iterator[str]:
    """The functions and methods that a file calls, without `start_` and without calls that are support."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            purposes = {getattr(k.value, "id", "") for k in node.keywords if k.arg == "purpose"}
            if not purposes & SUPPORT:
                yield name.removeprefix("start_")


def missing(lesson: str, source: str) -> set[str]:
    """Collectives of a strategy that its file does not call."""
    return LESSONS[lesson] - set(calls(source))


def misplaced(source: str) -> set[str]:
    """Collectives that a helper calls although they are a strategy's."""
    return COLLECTIVES & set(calls(source))


def helpers() -> list[Path]:
    """Every file beside the lessons, guards too."""
    found = [
        path
        for place in (GUARDS, *(MANUAL / name for name in HELPERS))
        for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])
    ]
    assert len(found) > len(HELPERS)
    return found


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_strategy_calls_its_own_collectives(lesson):
    assert not missing(lesson, (MANUAL / f"{lesson}.py").read_text())


@pytest.mark.parametrize("path", helpers(), ids=lambda path: path.stem)
def test_a_helper_calls_no_collective_of_a_strategy(path):
    assert not misplaced(path.read_text())


def test_a_lesson_elsewhere_is_noticed():
    hidden = "buckets.launch(axis)\naxis.all_reduce(flags, purpose=UNUSED)\n"
    assert missing("data_parallel", hidden) == {"all_reduce"}
    assert missing("fully_sharded", hidden) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert not missing("data_parallel", hidden + "axis.start_all_reduce(x, purpose=GRADIENTS)")


def test_a_collective_in_a_helper_is_noticed():
    assert misplaced("axis.start_all_gather(full, mine, purpose=PARAMETERS)") == {"all_gather"}
    assert misplaced("axis.all_reduce(total)") == {"all_reduce"}
    assert not misplaced("axis.all_gather(full, mine, purpose=RECORD)")
