"""Arguments that say which Python runs each side: the two may live in environments of their own."""

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro
from msgspec import Struct

from compare.execute.launch import EnvironmentMissing
from compare.execute.packages import why_not_python
from compare.execute.paths import check_python
from compare.spec.engines.engine import Side
from compare.spec.engines.registry import SIDES


def _python_flag(side: Side) -> object:
    return Annotated[str, tyro.conf.arg(help=f"Python that runs {side.name}, if it lives elsewhere.")]


if TYPE_CHECKING:
    SidePythons = Struct
else:
    SidePythons = msgspec.defstruct(
        "SidePythons",
        [(side.python_flag, _python_flag(side), sys.executable) for side in SIDES.values()],
        frozen=True,
        kw_only=True,
    )
    """A flag for each side."""


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
        check_python(flag, python)
        if python != sys.executable and (why := why_not_python(SIDES[name], python)):
            raise EnvironmentMissing(f"{flag} {python}: {why}")
    return pythons
