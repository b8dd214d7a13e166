"""Conversion of files that only one side can read: `python -m SIDE --convert SOURCE TARGET`."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from compare.contract.exit_codes import BAD_REQUEST
from compare.execute.launch import EnvironmentMissing, child_environment
from compare.spec.engines.registry import SIDES
from compare.spec.experiment import ExperimentError


def convert_by_side(
    source: Path, target: Path, foreign: str, *, pythons: Mapping[str, str], options: Sequence[str] = ()
) -> None:
    """Have the side that knows a format read or write it.

    Args:
        source, target: files or folders.
        foreign: the format: `Side.converts`.
        pythons: side -> its interpreter.
        options: more of the side's command line.

    Raises:
        ExperimentError: the source cannot be read safely, or does not fit.
        EnvironmentMissing: that side cannot be run here.
    """
    side = next(side for side in SIDES.values() if foreign in side.converts)
    python = pythons.get(side.name, sys.executable)
    command = [python, "-m", side.name, "--convert", str(source.absolute()), str(target.absolute()), *options]
    environment = child_environment(side, "cpu")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise EnvironmentMissing(f"--{side.python_flag} {python}: {error.strerror}") from None
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode} and no message"]
    if done.returncode == BAD_REQUEST:
        raise ExperimentError(said[-1])
    if done.returncode:
        raise EnvironmentMissing(f"{source} could not be converted by {python} -m {side.name}: {said[-1]}")
