"""Check that a Python has the packages of a side."""

import importlib.util
import os
import shutil
import sys

from compare.execute.launch import with_safe_path
from compare.execute.query import output_of
from compare.spec.engines.engine import Side

OLDEST = (3, 11)
CONTRACT = ("numpy", "msgspec", "safetensors")
"""Packages that both sides import through `compare`."""
MISSING = "missing:"
SCRIPT = f"""
import importlib.util, sys
if sys.version_info < {OLDEST}: sys.exit("it is Python %d.%d" % sys.version_info[:2])
print("{MISSING}", *[name for name in sys.argv[1:] if not importlib.util.find_spec(name)])
"""
TIMEOUT_S = 60


def why_not_python(side: Side, python: str) -> str:
    """The reason why a Python cannot run a side, and what to do; '' if it can."""
    packages = (*CONTRACT, *side.packages, side.name)
    if python == sys.executable:
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
    elif not shutil.which(python):
        return _other_python("no such program")
    else:
        try:
            command = [python, "-c", SCRIPT, *packages]
            code, output = output_of(command, with_safe_path(os.environ), TIMEOUT_S)
        except OSError as error:
            return _other_python(f"it cannot be run ({error.strerror})")
        last = (output.strip().splitlines() or [""])[-1]
        if code or not last.startswith(MISSING):
            return _other_python(last if last.startswith("it is Python") else "it answers as no Python")
        missing = last.removeprefix(MISSING).split()
    if not missing:
        return ""
    return f"shardpair is not installed there (no {', '.join(missing)}): install it, or give another Python"


def _other_python(reason: str) -> str:
    return f"{reason}: give the path of a Python {OLDEST[0]}.{OLDEST[1]} or newer with shardpair in it"
