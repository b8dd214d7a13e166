"""Tolerances: the largest difference of two correct runs, per precision and rung, each with its reason.

Engines add the same numbers in another order: across devices, inside a matrix product, in a softmax.
float64 is where equality is proven: its limit is 1e-10 for everything, a hundred times and more above what
rounding does there. In float32 and bfloat16 the limits are set from that noise as measured (the worst case
is in the reason) with a decade or so to spare, so that they pass on other machines and sizes; a mistake too
small to show above them shows in `shardpair check`, which is in float64.
"""

import math

from msgspec import Struct


class Tolerance(Struct, frozen=True):
    """The largest relative error that passes, and why."""

    limit: float
    reason: str
    steps: int = 0
    """Number of first steps that it holds for; 0 for all. The verdict says so."""


_EXACT = Tolerance(0.0, "copied, never computed: bitwise equal")
_ASKED = Tolerance(0.0, "what ran is what was asked for, to the last field, step and tensor")

_DONE = Tolerance(0.0, "what was done, as it was observed, is what was asked for: settings are equal or not")
_SAME_OVERFLOWS = Tolerance(
    0.0,
    "the same steps are skipped; engines and layouts sum over different numbers of rows in 16 bits, and may "
    "part at the edge of an overflow: lower precision.loss_scale to compare away from it",
)

TOLERANCES: dict[str, dict[str, Tolerance]] = {
    "float64": {
        "request": _ASKED,
        "batch": _EXACT,
        "initial_weights": _EXACT,
        "loss": Tolerance(1e-10, "sums in another order; worst measured 2e-16"),
        "gradients": Tolerance(1e-10, "sums in another order, through all layers; worst measured 2e-15"),
        "grad_norm": Tolerance(1e-10, "one sum over all gradients; worst measured 4e-16"),
        "first_weights": Tolerance(
            1e-10,
            "Adam divides a gradient by its own size, and small ones carry more rounding: 6e-13 measured",
        ),
        "first_moments": Tolerance(1e-10, "gradients, and their squares: twice their error; 2e-15 measured"),
        "first_update": Tolerance(1e-10, "the formulas, on the run's own gradients; 5e-16 measured"),
        "later_weights": Tolerance(
            1e-10, "rounding of 20 steps, each fed back into the next; 4e-13 measured"
        ),
        "final_weights": Tolerance(1e-10, "as after 20 steps, for as long as the run is"),
        "loss_curve": Tolerance(1e-10, "the same, seen through the loss: 6e-16 over 20 steps measured"),
        "norm_curve": Tolerance(1e-10, "the same, through the gradients; 6e-16 over 30 steps measured"),
    },
    "float32": {
        "request": _ASKED,
        "batch": _EXACT,
        "initial_weights": _EXACT,
        "loss": Tolerance(1e-6, "a few units in the last place (6e-8 each); worst measured 2e-7"),
        "gradients": Tolerance(1e-5, "relative to the largest of the tensor; worst measured 1e-6"),
        "grad_norm": Tolerance(1e-5, "one sum over all gradients; worst measured 2e-7"),
        "first_weights": Tolerance(
            1e-2,
            "Adam makes every gradient an update of about lr, however small: where rounding decides its sign "
            "the weights part by 2 lr. Key biases left out: 1e-4 over all layouts, 8e-4 seen on 8 devices",
        ),
        "first_moments": Tolerance(1e-5, "gradients, and their squares: twice their error; 2e-6 measured"),
        "first_update": Tolerance(2e-6, "the same, and weights of 24 bits; worst measured 2.4e-7"),
        "later_weights": Tolerance(1e-2, "as after the first step, 20 times; worst measured 5e-5"),
        "final_weights": Tolerance(1e-2, "as after 20 steps, for as long as the run is"),
        "loss_curve": Tolerance(
            1e-3, "rounding fed back at every step; 1e-5 over 120 steps and 2e-5 over 2000 measured"
        ),
        "norm_curve": Tolerance(1e-2, "the same, through the gradients; 5e-4 over 2000 steps measured"),
    },
    "bfloat16": {
        "request": _ASKED,
        "batch": _EXACT,
        "initial_weights": _EXACT,
        "loss": Tolerance(1e-4, "products keep 8 bits (4e-3 each), averaged over all tokens; 3e-6 measured"),
        "gradients": Tolerance(5e-2, "8 bits, rounded at other places in each framework; 1.3e-2 measured"),
        "grad_norm": Tolerance(5e-3, "averaged over all gradients; 6e-4 measured"),
        "first_weights": Tolerance(
            1.4,
            "of how far the tensor moved (rms). Adam moves every weight by about lr: where 8 bits decide "
            "the sign of a gradient, engines part by 2 lr. Signs at random would be 1.4, an update the "
            "other way is 2; 7.1e-1 measured, key biases left out",
        ),
        "first_moments": Tolerance(1e-1, "gradients, and their squares: twice their error; 2.5e-2 measured"),
        "first_update": Tolerance(2e-6, "weights, gradients and moments are float32: as there"),
        "later_weights": Tolerance(
            0.7,
            "of how far it moved in 20 steps, in which such signs average out; 2.1e-1 measured. Weights that "
            "did not move are 1",
        ),
        "final_weights": Tolerance(0.7, "as after 20 steps, for as long as the run is; 2.4e-1 measured"),
        "loss_curve": Tolerance(2e-2, "rounding fed back at every step; 5e-5 over 20 steps measured"),
        "norm_curve": Tolerance(
            1e-1,
            "the same, through the gradients; 2e-3 over 20 steps measured. Later ones are not held: in the "
            "same engine a change of 1e-7 in the initial weights moves the norm of one of 200 steps by 0.6",
            steps=20,
        ),
    },
    "float16": {
        "request": _ASKED,
        "batch": _EXACT,
        "initial_weights": _EXACT,
        "loss": Tolerance(1e-5, "products keep 11 bits (5e-4 each), averaged over all tokens; 1e-6 measured"),
        "gradients": Tolerance(2e-2, "11 bits, rounded at other places in each framework; 2.6e-3 measured"),
        "grad_norm": Tolerance(1e-3, "averaged over all gradients; 5e-5 measured"),
        "first_weights": Tolerance(
            0.7,
            "of how far the tensor moved (rms), as in bfloat16: 11 bits lose few signs; 7.1e-2 measured",
        ),
        "first_moments": Tolerance(4e-2, "gradients, and their squares: twice their error; 4e-3 measured"),
        "first_update": Tolerance(2e-6, "weights, gradients and moments are float32: as there"),
        "later_weights": Tolerance(0.1, "of how far it moved in 20 steps; 1e-2 measured"),
        "final_weights": Tolerance(0.1, "as after 20 steps, for as long as the run is; 1e-2 measured"),
        "loss_curve": Tolerance(2e-3, "rounding fed back at every step; 8e-6 over 20 steps measured"),
        "norm_curve": Tolerance(1e-2, "the same, through the gradients; 1e-4 over 20 steps measured"),
    },
}


LATER_STEPS = 20
"""After which `later_weights` are measured."""
_HOW_FAR = ("later_weights", "final_weights")


def _after(steps: int, later: Tolerance) -> Tolerance:
    """A limit of how far weights moved in fewer steps: wrong signs add up as sqrt(n), the way as n.

    Of a weight whose gradient is rounding, Adam's step has a random sign. Measured for 32 elements:
    0.19, 0.115, 0.074, 0.049, 0.034 after 1, 2, 4, 8, 20 steps.
    """
    limit = later.limit * math.sqrt(LATER_STEPS / steps)
    return Tolerance(limit, f"of how far it moved in {steps} steps; {later.limit:g} after {LATER_STEPS}")


_APART = {
    "initial_weights": "later_weights",
    "loss": "loss_curve",
    "gradients": "norm_curve",
    "grad_norm": "norm_curve",
    "first_weights": "later_weights",
    "first_moments": "norm_curve",
}
"""Rungs of runs that begin with states of their own, and the rung in which rounding had as long to grow."""


def tolerances_for(dtype: str, *, steps: int = LATER_STEPS, apart: bool = False) -> dict[str, Tolerance]:
    """The tolerances of one compute dtype, by rung.

    Args:
        dtype: `precision.dtype`.
        steps: how many the weights were trained.
        apart: each run goes on from a checkpoint of its own, in which its rounding so far is kept.
    """
    tolerances = TOLERANCES[dtype]
    if dtype == "float16" and steps < LATER_STEPS:
        tolerances = tolerances | {rung: _after(steps, tolerances[rung]) for rung in _HOW_FAR}
    tolerances = tolerances | {
        "loss_scale": _SAME_OVERFLOWS,
        "evaluations": tolerances["loss_curve"],
        "strategy": _DONE,
    }
    if not apart:
        return tolerances
    later = {rung: tolerances[like] for rung, like in _APART.items()}
    return tolerances | {
        rung: Tolerance(like.limit, f"each goes on from a checkpoint of its own: {like.reason}")
        for rung, like in later.items()
    }
