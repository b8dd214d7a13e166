"""The packages that an engine needs beyond its side, looked for in the Python that is to run it."""

import importlib.util
import os
import shutil
import subprocess
import sys

from compare.contract.engines.engine import Engine
from compare.execute.safe_path import with_safe_path

_LOOK = "import importlib.util, sys; sys.exit(not importlib.util.find_spec(sys.argv[1]))"
TIMEOUT_S = 60


def missing_package(engine: Engine, python: str) -> str:
    """What an engine lacks in a Python, and the line that installs it; '' if nothing.

    Args:
        engine: any; most need nothing beyond their side.
        python: the interpreter. One that does not exist is said elsewhere: here it lacks nothing.
    """
    if not engine.needs or not shutil.which(python):
        return ""
    return "" if _has(python, engine.needs) else engine.not_installed


def _has(python: str, package: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    found = subprocess.run(
        [python, "-c", _LOOK, package],
        env=with_safe_path(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return found.returncode == 0
