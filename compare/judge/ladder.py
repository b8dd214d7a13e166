"""The numerics ladder: does one run compute the same thing as another, and if not, where does it part?

First both must be what was asked for (`judge.acceptance`): two runs that stop early agree. Then each rung
compares what arises one after the other in training: the batch, the initial weights, the
loss, the gradients before clipping, their norm, weights and moments after one optimizer step, weights
after N steps, the curves of loss and norm. The first rung that fails names the kind of mistake: a wrong mean
shows in the gradients, a wrong decay in the first weights, a wrong beta2 in the moments and nowhere before.

Gradients come before anything that an optimizer did with them: Adam and clipping hide their scale.
The error of a tensor is max|a - b| / max|reference|, relative to the largest entry of that tensor;
entry by entry would divide by gradients that are zero in exact arithmetic, such as those of the key bias.
Tensors are read one by one: the size of a model is no reason to leave its gradients out.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from compare.contract.initial_weights import starting_sha256
from compare.contract.optimizer import global_norm
from compare.contract.parameters import fingerprint, initial_parameters
from compare.contract.record import Record, Step, read_tensors
from compare.contract.request import Rung, rungs_asked_for
from compare.judge.acceptance import objections
from compare.judge.tensor_errors import Found, without_key_bias, worst_tensor
from compare.judge.tolerances import Tolerance, tolerances_for

REQUEST = "request"
RUNGS = (
    REQUEST,
    "batch",
    "initial_weights",
    "loss",
    "gradients",
    "grad_norm",
    "first_weights",
    "first_moments",
    "later_weights",
    "loss_curve",
    "norm_curve",
)
EVALUATIONS = "evaluations"
"""One rung more for runs that evaluate; as far from each other as their loss curves may be."""


class RungResult(Struct, frozen=True, kw_only=True):
    """One rung, climbed or not."""

    rung: str
    error: float
    """Worst relative error; infinite where there is none to give: names differ, a value is not finite."""
    tolerance: float
    worst: str
    """Where the worst error is: a canonical parameter name, a step, ...; or what is wrong."""
    reason: str
    """Why the tolerance is what it is."""

    @property
    def passed(self) -> bool:
        """True if the error is within the tolerance. A NaN is not."""
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
        """True if every rung that was compared held, and at least one was."""
        return bool(self.rungs) and self.failure is None

    @property
    def compared_tensors(self) -> bool:
        """True if gradients, weights and moments were compared, and not losses and norms alone."""
        return "gradients" not in self.skipped and "first_weights" not in self.skipped

    def error(self, rung: str) -> float | None:
        """The worst error of one rung; None if it was skipped."""
        return next((result.error for result in self.rungs if result.rung == rung), None)

    def sentence(self) -> str:
        """PASS, or the first rung that failed with the worst place and its error."""
        if self.failure is None:
            return "PASS"
        bad = self.failure
        if not math.isfinite(bad.error):
            return f"FAIL at {bad.rung}: {bad.worst}"
        return f"FAIL at {bad.rung}: {bad.worst} is off by {bad.error:.2e} (tolerance {bad.tolerance:.0e})"


def climb(reference: Record, candidate: Record, *, reference_name: str = "", name: str = "") -> Verdict:
    """Hold a run against a reference, rung by rung.

    Args:
        reference: the run that counts as right, if it is what was asked for.
        candidate: the run under test; its precision decides the tolerances.
        reference_name: what to call the reference; its engine by default.
        name: what to call the candidate; its engine by default.

    Raises:
        RecordError: a file of tensors is garbled.
    """
    reference_name = reference_name or reference.manifest.engine
    name = name or candidate.manifest.engine
    apart = _begin_apart(reference, candidate)
    tolerances = tolerances_for(candidate.manifest.experiment.precision.dtype, apart=apart)
    results = [_compare_requests([(reference_name, reference), (name, candidate)], tolerances[REQUEST])]
    skipped = {}
    for rung in RUNGS[1:]:
        compared = _COMPARE[rung](reference, candidate)
        if compared is None:
            skipped[rung] = _why_skipped(rung, candidate)
            continue
        error, worst = compared
        results.append(_result(rung, error, worst, tolerances[rung]))
    if evaluated := _compare_evaluations(reference, candidate):
        results.append(_result(EVALUATIONS, *evaluated, tolerances["loss_curve"]))
    return Verdict(candidate=name, reference=reference_name, rungs=results, skipped=skipped)


def _result(rung: str, error: float, worst: str, tolerance: Tolerance) -> RungResult:
    return RungResult(
        rung=rung,
        error=error if math.isfinite(error) else math.inf,
        tolerance=tolerance.limit,
        worst=worst,
        reason=tolerance.reason,
    )


def _compare_requests(runs: Sequence[tuple[str, Record]], tolerance: Tolerance) -> RungResult:
    """Both runs against what was asked of them, and of them together."""
    wrong = [f"{name}: {objection}" for name, run in runs for objection in objections(run)]
    reference, candidate = (run.manifest.experiment.precision.dtype for _, run in runs)
    if reference != candidate:
        wrong.append(f"{candidate} cannot be held against a reference in {reference}")
    return _result(REQUEST, math.inf if wrong else 0.0, "; ".join(wrong[:2]), tolerance)


def _why_skipped(rung: str, candidate: Record) -> str:
    request = candidate.request
    if request and request.ladder and rung == "first_moments":
        return "the optimizer keeps no moments"
    return "it was not asked for" if request and not request.ladder else "the runs did not leave it"


def _compare_batch(reference: Record, candidate: Record) -> Found | None:
    if reference.manifest.corpus_sha256 != candidate.manifest.corpus_sha256:
        return math.inf, "the corpus is another one"
    return _compare_tensors(reference, candidate, Rung.BATCH)


def _compare_initial_weights(reference: Record, candidate: Record) -> Found | None:
    """Against the reference's, and both against what they were to begin with: the seed's weights, which are
    bitwise the same everywhere, or those that were given."""
    if _begin_apart(reference, candidate):
        for run in (candidate, reference):
            if run.request and run.manifest.initial_weights_sha256 != starting_sha256(run.request):
                return math.inf, f"{run.manifest.engine} begins with other weights than its checkpoint has"
        return _compare_weights(reference, candidate, Rung.INITIAL_WEIGHTS)
    tensors = _compare_tensors(reference, candidate, Rung.INITIAL_WEIGHTS)
    if tensors and tensors[0]:
        return tensors
    fingerprints = [run.manifest.initial_weights_sha256 for run in (candidate, reference)]
    if fingerprints[0] != fingerprints[1]:
        return math.inf, "their fingerprint is another one"
    request = candidate.request
    if request is None:
        asked = fingerprint(initial_parameters(candidate.manifest.experiment))
    else:
        asked = starting_sha256(request)
    if fingerprints[0] != asked:
        given = bool(request and (request.init_from or request.resume))
        source = "were given" if given else "the seed gives"
        return math.inf, f"both runs begin with other weights than {source}"
    return 0.0, ""


def _begin_apart(reference: Record, candidate: Record) -> bool:
    """Whether each goes on from a checkpoint of its own."""
    runs = [run.request.resume for run in (reference, candidate) if run.request and run.request.resume]
    return len(runs) == 2 and runs[0].checkpoint != runs[1].checkpoint


def _compare_moments(reference: Record, candidate: Record) -> Found | None:
    found = [
        (error, f"{rung.value.removeprefix('first_')} of {worst}")
        for rung in (Rung.FIRST_M, Rung.FIRST_V)
        if (compared := _compare_tensors(reference, candidate, rung)) is not None
        for error, worst in (compared,)
    ]
    return max(found) if found else None


def _compare_tensors(reference: Record, candidate: Record, rung: Rung) -> Found | None:
    expected, found = read_tensors(reference.folder, rung), read_tensors(candidate.folder, rung)
    if not expected and not found:
        return _missing(candidate, rung)
    return worst_tensor(found, expected)


def _compare_weights(reference: Record, candidate: Record, rung: Rung) -> Found | None:
    expected, found = read_tensors(reference.folder, rung), read_tensors(candidate.folder, rung)
    if not expected and not found:
        return _missing(candidate, rung)
    if candidate.manifest.experiment.precision.dtype == "float64":
        return worst_tensor(found, expected)
    return worst_tensor(found, expected, select=without_key_bias)


def _missing(candidate: Record, rung: Rung) -> Found | None:
    """None for a rung that was not asked for; a failure if it was, and both runs lack it."""
    asked = rungs_asked_for(candidate.request) if candidate.request else ()
    return (math.inf, "neither run left it") if rung in asked else None


def _compare_norm(reference: Record, candidate: Record) -> Found:
    """The first norm against the reference's, and each run's against the gradients that it left."""
    worst = _worst_step(reference.steps[:1], candidate.steps[:1], "grad_norm")
    for whose, run in (("", candidate), ("the reference's ", reference)):
        gradients = read_tensors(run.folder, Rung.GRADIENTS)
        if gradients and math.isfinite(worst[0]):
            own, said = global_norm(gradients), run.steps[0].grad_norm
            error = abs(said - own) / own if own else abs(said)
            worst = max(worst, (error, f"step {run.steps[0].step}, against the norm of {whose}own gradients"))
    return worst


def _compare_first(field: str):
    def compare(reference: Record, candidate: Record) -> Found:
        return _worst_step(reference.steps[:1], candidate.steps[:1], field)

    return compare


def _compare_curve(field: str):
    def compare(reference: Record, candidate: Record) -> Found:
        if len(reference.steps) != len(candidate.steps):
            return math.inf, f"{len(candidate.steps)} steps instead of {len(reference.steps)}"
        return _worst_step(reference.steps, candidate.steps, field)

    return compare


def _compare_evaluations(reference: Record, candidate: Record) -> Found | None:
    """Losses of both splits, after the same steps; None where neither run has any."""
    if not reference.evaluations and not candidate.evaluations:
        return None
    if [one.step for one in reference.evaluations] != [one.step for one in candidate.evaluations]:
        return math.inf, f"{len(candidate.evaluations)} evaluations instead of {len(reference.evaluations)}"
    worst = (-1.0, "")
    for expected, found in zip(reference.evaluations, candidate.evaluations, strict=True):
        for split in ("train", "validation"):
            right, loss = getattr(expected, split), getattr(found, split)
            off = abs(loss - right) / abs(right) if right else abs(loss)
            if not math.isfinite(off):
                return math.inf, f"the {split} loss after step {found.step} is {loss} instead of {right}"
            worst = max(worst, (off, f"{split} after step {found.step}"), key=lambda one: one[0])
    return worst


def _worst_step(reference: list[Step], candidate: list[Step], field: str) -> Found:
    worst = (-1.0, "")
    for before, after in zip(reference, candidate, strict=True):
        expected, found = getattr(before, field), getattr(after, field)
        off = abs(found - expected) / abs(expected) if expected else abs(found)
        if not math.isfinite(off):
            return math.inf, f"step {after.step} has {field} {found} instead of {expected}"
        worst = max(worst, (off, f"step {after.step}"), key=lambda found: found[0])
    return worst


_COMPARE: dict[str, Callable[[Record, Record], Found | None]] = {
    "batch": _compare_batch,
    "initial_weights": _compare_initial_weights,
    "loss": _compare_first("loss"),
    "gradients": lambda *runs: _compare_tensors(*runs, Rung.GRADIENTS),
    "grad_norm": _compare_norm,
    "first_weights": lambda *runs: _compare_weights(*runs, Rung.FIRST_WEIGHTS),
    "first_moments": _compare_moments,
    "later_weights": lambda *runs: _compare_weights(*runs, Rung.LATER_WEIGHTS),
    "loss_curve": _compare_curve("loss"),
    "norm_curve": _compare_curve("grad_norm"),
}
