"""The numerics ladder: does one run compute the same thing as another, and if not, where does it part?

Each rung compares what arises one after the other in training: the batch, the initial weights, the
loss, the gradients before clipping, their norm, weights and moments after one optimizer step, weights
after N steps, the loss curve. The first rung that fails names the kind of mistake: a wrong mean shows in
the gradients, a wrong decay in the first weights, a wrong beta2 in the moments and nowhere before.

Gradients come before anything that an optimizer did with them: Adam and clipping hide their scale.
The error of a tensor is max|a - b| / max|reference|, relative to the largest entry of that tensor;
entry by entry would divide by gradients that are zero in exact arithmetic, such as those of the key bias.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec import Struct

from compare.contract.record import Record, Rung, Step, read_tensors
from compare.tolerances import Tolerance, tolerances_for

KEY = 1  # its place among query, key, value

RUNGS = (
    "batch",
    "initial_weights",
    "loss",
    "gradients",
    "grad_norm",
    "first_weights",
    "first_moments",
    "later_weights",
    "loss_curve",
)


class RungResult(Struct, frozen=True, kw_only=True):
    """One rung, climbed or not."""

    rung: str
    error: float
    """Worst relative error; infinite where shapes or names differ or a value is not finite."""
    tolerance: float
    worst: str
    """Where the worst error is: a canonical parameter name, a step, ..."""
    reason: str
    """Why the tolerance is what it is."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance. A NaN is not."""
        return self.error <= self.tolerance


class Verdict(Struct, frozen=True, kw_only=True):
    """One run held against another."""

    candidate: str
    reference: str
    rungs: list[RungResult]
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Rungs that could not be compared, and why."""

    @property
    def failure(self) -> RungResult | None:
        """The first rung that failed."""
        return next((result for result in self.rungs if not result.passed), None)

    @property
    def passed(self) -> bool:
        """Whether every rung that was compared held."""
        return self.failure is None

    def error(self, rung: str) -> float | None:
        """The worst error of one rung; None if it was skipped."""
        return next((result.error for result in self.rungs if result.rung == rung), None)

    def sentence(self) -> str:
        """PASS, or the first rung that failed with the worst place and its error."""
        if self.failure is None:
            return "PASS"
        bad = self.failure
        return f"FAIL at {bad.rung}: {bad.worst} is off by {bad.error:.2e} (tolerance {bad.tolerance:.0e})"


def climb(reference: Record, candidate: Record, *, reference_name: str = "", name: str = "") -> Verdict:
    """Hold a run against a reference, rung by rung.

    Args:
        reference: the run that counts as right.
        candidate: the run under test; its precision decides the tolerances.
        reference_name: what to call the reference; its engine by default.
        name: what to call the candidate; its engine by default.
    """
    tolerances = tolerances_for(candidate.manifest.experiment.precision.dtype)
    results, skipped = [], {}
    for rung in RUNGS:
        compared = _COMPARE[rung](reference, candidate)
        if compared is None:
            skipped[rung] = "the runs did not leave it"
            continue
        error, worst = compared
        tolerance: Tolerance = tolerances[rung]
        results.append(
            RungResult(
                rung=rung,
                error=error if math.isfinite(error) else math.inf,
                tolerance=tolerance.limit,
                worst=worst,
                reason=tolerance.reason,
            )
        )
    return Verdict(
        candidate=name or candidate.manifest.engine,
        reference=reference_name or reference.manifest.engine,
        rungs=results,
        skipped=skipped,
    )


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    """max|value - reference| / max|reference|; absolute where the reference is all zero.

    Infinite for another shape, or where a value is not finite.
    """
    if value.shape != reference.shape:
        return math.inf
    difference = np.abs(value.astype(np.float64) - reference.astype(np.float64)).max(initial=0.0)
    scale = np.abs(reference.astype(np.float64)).max(initial=0.0)
    error = float(difference / scale) if scale else float(difference)
    return error if math.isfinite(error) else math.inf


def worst_tensor(values: Mapping[str, np.ndarray], references: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """The largest `relative_error` over tensors of the same names, and its name."""
    if values.keys() != references.keys():
        odd = sorted(values.keys() ^ references.keys())
        return math.inf, f"{odd[0]} (only in one of the two)"
    errors = {name: relative_error(values[name], references[name]) for name in references}
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def without_key_bias(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights without the key third of every query-key-value bias (3, H, D).

    A key bias adds the same number to all logits of a query, and softmax does not see it: in exact
    arithmetic its gradient is zero, and it changes nothing. In less than float64, what rounding leaves of
    that gradient is as large as Adam's epsilon, and Adam makes it an update as large as any other.
    """
    return {
        name: np.delete(tensor, KEY, axis=0) if name.endswith(".attention.qkv.bias") else tensor
        for name, tensor in weights.items()
    }


def _compare_batch(reference: Record, candidate: Record) -> tuple[float, str] | None:
    if reference.manifest.corpus_sha256 != candidate.manifest.corpus_sha256:
        return math.inf, "the corpus"
    return _compare_tensors(reference, candidate, Rung.BATCH)


def _compare_initial_weights(reference: Record, candidate: Record) -> tuple[float, str] | None:
    tensors = _compare_tensors(reference, candidate, Rung.INITIAL_WEIGHTS)
    if tensors is not None:
        return tensors
    same = reference.manifest.initial_weights_sha256 == candidate.manifest.initial_weights_sha256
    return (0.0 if same else math.inf), "their fingerprint"


def _compare_moments(reference: Record, candidate: Record) -> tuple[float, str] | None:
    found = [
        (error, f"{rung.value.removeprefix('first_')} of {worst}")
        for rung in (Rung.FIRST_M, Rung.FIRST_V)
        if (compared := _compare_tensors(reference, candidate, rung)) is not None
        for error, worst in (compared,)
    ]
    return max(found) if found else None


def _compare_tensors(reference: Record, candidate: Record, rung: Rung) -> tuple[float, str] | None:
    expected, found = read_tensors(reference.folder, rung), read_tensors(candidate.folder, rung)
    if not expected and not found:
        return None
    return worst_tensor(found, expected)


def _compare_weights(reference: Record, candidate: Record, rung: Rung) -> tuple[float, str] | None:
    expected, found = read_tensors(reference.folder, rung), read_tensors(candidate.folder, rung)
    if not expected and not found:
        return None
    if candidate.manifest.experiment.precision.dtype != "float64":
        expected, found = without_key_bias(expected), without_key_bias(found)
    return worst_tensor(found, expected)


def _compare_first(field: str):
    def compare(reference: Record, candidate: Record) -> tuple[float, str]:
        return _worst_step(reference.steps[:1], candidate.steps[:1], field)

    return compare


def _compare_curve(reference: Record, candidate: Record) -> tuple[float, str]:
    if len(reference.steps) != len(candidate.steps):
        return math.inf, f"{len(candidate.steps)} steps instead of {len(reference.steps)}"
    return _worst_step(reference.steps, candidate.steps, "loss")


def _worst_step(reference: list[Step], candidate: list[Step], field: str) -> tuple[float, str]:
    def error(pair: tuple[Step, Step]) -> float:
        expected, found = getattr(pair[0], field), getattr(pair[1], field)
        off = abs(found - expected) / abs(expected) if expected else abs(found)
        return off if math.isfinite(off) else math.inf

    worst = max(zip(reference, candidate, strict=True), key=error)
    return error(worst), f"step {worst[0].step}"


_COMPARE = {
    "batch": _compare_batch,
    "initial_weights": _compare_initial_weights,
    "loss": _compare_first("loss"),
    "gradients": lambda *runs: _compare_tensors(*runs, Rung.GRADIENTS),
    "grad_norm": _compare_first("grad_norm"),
    "first_weights": lambda *runs: _compare_weights(*runs, Rung.FIRST_WEIGHTS),
    "first_moments": _compare_moments,
    "later_weights": lambda *runs: _compare_weights(*runs, Rung.LATER_WEIGHTS),
    "loss_curve": _compare_curve,
}
