"""`shardpair mirror`: lines of code of each lesson, alone and with the helpers that it uses."""

import json

import pytest

from compare.cli import main
from compare.commands.mirror import FOLDERS, STRATEGIES, lessons_of, lines_of_code

FILES = {
    "__init__.py": "from side.engine import data_parallel, fully_sharded, tensor_parallel, pipeline_parallel",
    "data_parallel.py": "from side.engine.buckets import Bucket\nimport side.engine.shared",
    "fully_sharded.py": "from side.engine.zero import units\nimport side.engine.shared\nimport side.comm",
    "tensor_parallel.py": "import numpy",
    "pipeline_parallel.py": "from compare.pipeline.ticks import Ticks",
    "buckets.py": '"""Text."""\n\n# a comment\nONE = 1\nTWO = 2',
    "shared.py": "ONE = 1",
    "optimizer.py": "from side.engine.zero.layout import ONE\nimport side.engine.shared",
    "runner.py": "from side.engine.pipeline_parallel import ONE\nfrom side.engine.buckets import Bucket",
    "norm.py": "from side.engine.buckets import Bucket\nfrom side.engine.zero.layout import ONE",
    "alone.py": "ONE = 1",
    "zero/__init__.py": "",
    "zero/units.py": "def units():\n    from side.engine.zero.layout import ONE",
    "zero/layout.py": "ONE = 1",
}

PIPELINE = {
    "compare/pipeline/ticks.py": "import numpy\nONE = 1",
    "compare/pipeline/other.py": "import compare.pipeline.ticks",
}


@pytest.fixture
def engine(tmp_path):
    own = {f"side/engine/{name}": source for name, source in FILES.items()}
    for name, source in {**own, **PIPELINE}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "side" / "engine"


def test_helpers_are_what_a_strategy_uses(engine):
    """`shared` counts twice; not `norm`, which belongs to two strategies, and `alone`, to none."""
    lessons = lessons_of(engine)
    assert {name: lesson.helpers for name, lesson in lessons.items()} == {
        "data_parallel": ["buckets.py", "shared.py"],
        "fully_sharded": ["optimizer.py", "shared.py", "zero/layout.py", "zero/units.py"],
        "tensor_parallel": [],
        "pipeline_parallel": ["buckets.py", "compare/pipeline/ticks.py", "runner.py"],
    }
    assert {name: (lesson.code, lesson.with_helpers, lesson.lines) for name, lesson in lessons.items()} == {
        "data_parallel": (2, 5, 2),
        "fully_sharded": (3, 9, 3),
        "tensor_parallel": (1, 1, 1),
        "pipeline_parallel": (1, 7, 1),
    }


def test_lines_of_code_are_neither_blank_nor_comment_nor_docstring():
    source = '"""Text.\n\nMore."""\n\n# why\ndef f():\n    """Text."""\n    return """two\nlines"""  # end\n'
    assert lines_of_code(source) == 3


def test_every_engine_has_every_lesson_as_json(capsys):
    assert main(["mirror", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts.pop("guards")["torchpar/manual"] > 100
    assert list(counts) == list(STRATEGIES)
    for by_folder in counts.values():
        assert list(by_folder) == list(FOLDERS.values())
        for lesson in by_folder.values():
            assert 0 < lesson["code"] <= lesson["with_helpers"]
            assert lesson["code"] < lesson["lines"]
    assert "compare/pipeline/ticks.py" in counts["pipeline_parallel"]["jaxpar/manual"]["helpers"]
    assert "sharded_optimizer.py" in counts["fully_sharded"]["torchpar/manual"]["helpers"]


def test_table(capsys):
    assert main(["mirror"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{strategy}.py" in printed for strategy in STRATEGIES)
