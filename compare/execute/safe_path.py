"""The environment of a side's Python: what it imports is what is installed, never the current folder's.

`python -m SIDE` puts the current folder first on its path, so that a `numpy.py` or `compare.py` that lies
where the user works would be executed. PYTHONSAFEPATH, unlike `-P`, also reaches what that Python starts.
"""

import os
from collections.abc import Mapping
from pathlib import Path


def with_safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with a safe path. PYTHONPATH is honoured, and has our source tree behind it, if we run
    from one: without an installation nothing else leads to the sides."""
    root = Path(__file__).parents[2]
    folders = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    if (root / "pyproject.toml").is_file():
        folders.append(str(root))
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return {**environment, "PYTHONSAFEPATH": "1", **path}
