"""How far two correct runs may differ, per precision and rung, each with its reason.

Engines add the same numbers in another order: across devices, inside a matrix product, in a softmax.
Every limit is set from that noise as measured (the worst case is in the reason), a decade or so above
it, and far below what the smallest planted fault does (`shardpair faults`).
"""

from msgspec import Struct


class Tolerance(Struct, frozen=True):
    """The largest relative error that passes, and why."""

    limit: float
    reason: str


EXACT = Tolerance(0.0, "copied, never computed")

TOLERANCES: dict[str, dict[str, Tolerance]] = {
    "float64": {
        "batch": EXACT,
        "initial_weights": EXACT,
        "loss": Tolerance(1e-10, ""),
        "gradients": Tolerance(1e-10, ""),
        "grad_norm": Tolerance(1e-10, ""),
        "first_weights": Tolerance(1e-10, ""),
        "first_moments": Tolerance(1e-10, ""),
        "later_weights": Tolerance(1e-10, ""),
        "loss_curve": Tolerance(1e-10, ""),
    },
    "float32": {
        "batch": EXACT,
        "initial_weights": EXACT,
        "loss": Tolerance(1e-6, ""),
        "gradients": Tolerance(1e-5, ""),
        "grad_norm": Tolerance(1e-5, ""),
        "first_weights": Tolerance(1e-4, ""),
        "first_moments": Tolerance(1e-5, ""),
        "later_weights": Tolerance(1e-3, ""),
        "loss_curve": Tolerance(1e-3, ""),
    },
    "bfloat16": {
        "batch": EXACT,
        "initial_weights": EXACT,
        "loss": Tolerance(1e-2, ""),
        "gradients": Tolerance(1e-1, ""),
        "grad_norm": Tolerance(1e-1, ""),
        "first_weights": Tolerance(1e-1, ""),
        "first_moments": Tolerance(1e-1, ""),
        "later_weights": Tolerance(1e-1, ""),
        "loss_curve": Tolerance(1e-1, ""),
    },
}


def tolerances_for(dtype: str) -> dict[str, Tolerance]:
    """The tolerances of one compute dtype, by rung."""
    return TOLERANCES[dtype]
