"""The tutorial, docs/libraries.md: its code runs as it stands there."""

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.plugin.test_plugin import ENVIRONMENT, ROOT, command
from tests.support import processes

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "libraries.md").read_text()
BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def write_files(folder: Path) -> list[str]:
    """Write the files of the page; a file has one or more blocks. Returns the names."""
    files = defaultdict(list)
    for name, text in BLOCK.findall(PAGE):
        files[name].append(text)
    for name, blocks in files.items():
        (folder / name).write_text("\n\n".join(blocks))
    return sorted(files)


def test_tutorial_runs(tmp_path):
    assert PAGE.count("```python") == len(BLOCK.findall(PAGE))
    assert write_files(tmp_path) == ["script.py", "test_jax.py", "test_torch.py"]
    done = processes.run(command(tmp_path), cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^7 passed", done.stdout.splitlines()[-1].strip("= ")), done.stdout
    done = processes.run([sys.executable, "script.py"], cwd=tmp_path, env=ENVIRONMENT)
    (printed,) = re.findall(r"It prints `(.*?)`", PAGE)
    assert done.stdout == f"{printed}\n", done.stderr
