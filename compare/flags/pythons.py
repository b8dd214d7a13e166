"""Arguments that say which Python runs each side: the two may live in environments of their own."""

import shutil
import sys

from msgspec import Struct

from compare.execute.launch import EnvironmentMissing
from compare.execute.packages import why_not_python
from compare.spec.engines.registry import SIDES
from compare.spec.experiment import ExperimentError


class SidePythons(Struct, frozen=True, kw_only=True):
    """A Python for each side."""

    jax_python: str = sys.executable
    """Python that runs jaxpar, if it lives elsewhere."""
    torch_python: str = sys.executable
    """Python that runs torchpar, if it lives elsewhere."""


def pythons_of(arguments: SidePythons) -> dict[str, str]:
    """Side -> the interpreter that its flag names."""
    return {side.name: getattr(arguments, side.python_flag) for side in SIDES.values()}


def checked_pythons(arguments: SidePythons) -> dict[str, str]:
    """`pythons_of`, each tried unless it is this one.

    Raises:
        ExperimentError: there is no such program.
        EnvironmentMissing: it is no Python, or shardpair is not installed there.
    """
    pythons = pythons_of(arguments)
    for name, python in pythons.items():
        flag = f"--{SIDES[name].python_flag}"
        if not shutil.which(python):
            raise ExperimentError(f"{flag} {python}: no such program; give the path of a Python")
        if python != sys.executable and (why := why_not_python(SIDES[name], python)):
            raise EnvironmentMissing(f"{flag} {python}: {why}")
    return pythons
