"""`make measure`: run check, golden and faults again, and keep their errors in docs/measured.json.

    python docs/measured.py faults        # one of them

The docs quote these numbers. It takes a while: about 90 trainings of a tiny model, one after another.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

MEASURED = Path(__file__).parent / "measured.json"
COMMANDS = {
    "check_float64": ("check",),
    "check_float32": ("check", "check", "--precision.dtype", "float32"),
    "golden": ("golden",),
    "faults": ("faults",),
}

Errors = dict[str, float | None]
"""By rung; None stands for an error that is not finite."""


class Measured(Struct, frozen=True, kw_only=True):
    """Measurements of the runs."""

    versions: dict[str, str]
    """Of Python, JAX and PyTorch."""
    studies: dict[str, dict[str, Errors]]
    """Errors of every case against its reference, by study and case."""


class _Rung(Struct):
    rung: str
    error: float | None


class _Verdict(Struct):
    candidate: str
    rungs: list[_Rung]


class _Outcome(Struct):
    """JSON of `check`, `faults` and `golden`, as far as it is kept."""

    verdicts: list[_Verdict]
    versions: list[dict[str, str]] = []


def read_measured() -> Measured:
    """The last measurements."""
    return msgspec.json.decode(MEASURED.read_bytes(), type=Measured)


def kept(outcomes: dict[str, bytes]) -> Measured:
    """The part of the commands' JSON that is kept, by study."""
    decoded = {name: msgspec.json.decode(text, type=_Outcome) for name, text in outcomes.items()}
    versions: dict[str, str] = {}
    for of_case in (one for outcome in decoded.values() for one in outcome.versions):
        versions |= {name: of_case[name] for name in ("python", "jax", "torch") if name in of_case}
    return Measured(
        versions=versions,
        studies={
            name: {
                verdict.candidate: {result.rung: _shortened(result.error) for result in verdict.rungs}
                for verdict in outcome.verdicts
            }
            for name, outcome in decoded.items()
        },
    )


def _shortened(error: float | None) -> float | None:
    """An error to the two digits that are quoted."""
    return None if error is None else float(f"{error:.1e}")


def write(measured: Measured) -> None:
    """Keep them for the docs."""
    MEASURED.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


def main(names: list[str]) -> int:
    """Measure these, or all, and write. Returns the exit code: 0 if every command passed."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or COMMANDS:
            command = COMMANDS[name]
            shardpair = [sys.executable, "-m", "compare", *command, "--json", "--run_dir", f"{folder}/{name}"]
            done = subprocess.run(shardpair, stdout=subprocess.PIPE, check=False)
            if done.returncode:
                return done.returncode
            outcomes[name] = done.stdout
    found = kept(outcomes)
    earlier = read_measured() if names else Measured(versions={}, studies={})
    write(Measured(versions=earlier.versions | found.versions, studies=earlier.studies | found.studies))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
