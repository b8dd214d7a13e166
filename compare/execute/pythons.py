"""The packages that a side needs, looked for in the Python that is to run them."""

import importlib.util
import os
import shutil
import sys

from compare.execute.launch import with_safe_path
from compare.execute.query import output_of
from compare.spec.engines.engine import Side

OLDEST = (3, 11)
CONTRACT = ("numpy", "msgspec", "safetensors")
"""Packages that the contract imports, on every side."""
_ANSWER = "missing:"
_LOOK = f"""
import importlib.util, sys
if sys.version_info < {OLDEST}: sys.exit("it is Python %d.%d" % sys.version_info[:2])
print("{_ANSWER}", *[name for name in sys.argv[1:] if not importlib.util.find_spec(name)])
"""
TIMEOUT_S = 60


def why_not_python(side: Side, python: str) -> str:
    """Why a Python cannot run a side: it does not start, is no Python, or lacks packages; '' if it can."""
    lacks = _lacks(python, *CONTRACT, *side.packages, side.name)
    if isinstance(lacks, str):
        return f"{lacks}: give the path of a Python {OLDEST[0]}.{OLDEST[1]} or newer with shardpair in it"
    if not lacks:
        return ""
    return f"shardpair is not installed there (no {', '.join(lacks)}): install it, or give another Python"


def _lacks(python: str, *packages: str) -> list[str] | str:
    """The packages that a Python has not; or why it does not say."""
    if python == sys.executable:
        return [name for name in packages if importlib.util.find_spec(name) is None]
    if not shutil.which(python):
        return "no such program"
    command = [python, "-c", _LOOK, *packages]
    try:
        code, output = output_of(command, with_safe_path(os.environ), TIMEOUT_S)
    except OSError as error:  # no interpreter behind its #!, another machine's program, no answer
        return f"it cannot be run ({error.strerror})"
    last = (output.strip().splitlines() or [""])[-1]
    if code or not last.startswith(_ANSWER):
        return last if last.startswith("it is Python") else "it is no Python that can be asked"
    return last.removeprefix(_ANSWER).split()
