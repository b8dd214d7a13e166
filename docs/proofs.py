"""What docs/data keeps of check, golden and faults: how far every case was off, rung by rung."""

import math
from functools import cache
from pathlib import Path

from msgspec import Struct

from compare.host.json_files import read_json
from compare.judge.comparison import Comparison

PROOFS = {
    "check-float64": "check",
    "check-float32": "check check --precision.dtype float32",
    "golden": "golden",
    "faults": "faults",
}
"""Arguments of shardpair, by name."""
Errors = dict[str, float | None]
"""By rung, to the two digits that are quoted; None stands for an error that is not finite."""


class Proof(Struct, frozen=True, kw_only=True):
    """What is kept of a comparison."""

    versions: dict[str, str]
    """Of Python, JAX and PyTorch."""
    errors: dict[str, Errors]
    """Of every case against its reference."""


def kept(outcome: Comparison) -> Proof:
    """The part of a comparison that the docs show."""
    versions = {name: version for of_case in outcome.versions for name, version in of_case.items()}
    return Proof(
        versions={name: versions[name] for name in ("python", "jax", "torch") if name in versions},
        errors={
            verdict.candidate: {
                result.rung: float(f"{result.error:.1e}") if math.isfinite(result.error) else None
                for result in verdict.rungs
            }
            for verdict in outcome.verdicts
        },
    )


@cache
def errors_of(name: str) -> dict[str, Errors]:
    """The errors of every case of a comparison, as they were measured last."""
    return read_json(Path(__file__).parent / "data" / f"{name}.json", Proof).errors
