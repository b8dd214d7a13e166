"""Request: what the harness asks of an engine, as RUN_DIR/request.json, and which tensors it must leave."""

from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from compare.checkpoint.description import CHECKPOINTS, checkpoints_in
from compare.contract.timing import Timing
from compare.numerics.loss_scale import LossScale, first_scale
from compare.numerics.optimizer import moment_names
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, one_line

REQUEST = "request.json"
Platform = Literal["cpu", "gpu"]
T = TypeVar("T")


class Rung(StrEnum):
    """Tensors that a run leaves for the ladder, in the order in which they arise."""

    BATCH = "batch"
    """`inputs` and `targets` (A, B, T) of the first step as the devices received them, gathered in order."""
    INITIAL_WEIGHTS = "initial_weights"
    ROUTING = "routing"
    """Of a model with experts `experts` (L, A, B, T, k), int32: those of each token of the first step, in
    ascending order, put together from the devices as `BATCH` is. A side also counts, in every step, how often
    each was chosen (`record.Step.tokens_per_expert`)."""
    GRADIENTS = "gradients"
    """Gradients of the first step's mean loss over the global batch, synchronised, before clipping."""
    FIRST_WEIGHTS = "first_weights"
    """Weights after the first optimizer step."""
    FIRST_M = "first_m"
    """First moments (SGD: momentum buffer) after the first optimizer step."""
    FIRST_V = "first_v"
    """Second moments after the first optimizer step."""
    SECOND_GRADIENTS = "second_gradients"
    """As `GRADIENTS`, of the second step."""
    SECOND_WEIGHTS = "second_weights"
    """Weights after the second optimizer step, if they are not at one of the next two."""
    SECOND_M = "second_m"
    SECOND_V = "second_v"
    LATER_WEIGHTS = "later_weights"
    """Weights after `Request.later_step` optimizer steps."""
    FINAL_WEIGHTS = "final_weights"
    """Weights after the last optimizer step, if it is neither the first nor `Request.later_step`."""


UPDATES = (
    (Rung.GRADIENTS, Rung.FIRST_M, Rung.FIRST_V),
    (Rung.SECOND_GRADIENTS, Rung.SECOND_M, Rung.SECOND_V),
)
"""Of the first steps, beside the weights. The second is the first with moments and another bias correction:
what an optimizer does not do at once shows there."""
MOMENTS = {rung: name for _, *rungs in UPDATES for rung, name in zip(rungs, "mv", strict=True)}
"""The moment whose values are a rung (`compare.numerics.optimizer.moment_names`)."""


class ResumePoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint to continue from, as it was at the time of the request."""

    checkpoint: str
    """Folder of the checkpoint, an absolute path."""
    step: int
    """Batches drawn before it: the run's first is `batch(step)`."""
    loss_scale: LossScale | UnsetType = UNSET


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's order: everything that `python -m SIDE RUN_DIR` needs to know."""

    engine: str
    experiment: Experiment
    platform: Platform = "cpu"
    ladder: bool = False
    """Leave the tensors of the ladder's rungs (`Rung`)."""
    later_step: int = 20
    """Number of optimizer steps before `Rung.LATER_WEIGHTS`; at most all of them."""
    corpus_sha256: str = ""
    """Digest of data that the harness has validated already; empty makes the engine validate it."""
    timeout_s: float = 600.0
    """Seconds without any progress after which the run counts as hung."""
    cache_dir: str = ""
    """Folder for JAX's compiled programs between runs; empty for none."""
    init_from: str = ""
    """Safetensors with canonical names to begin with, an absolute path; empty for the seed's weights."""
    init_sha256: str = ""
    """`fingerprint` of these weights in the dtype of training; empty if they were not checked yet."""
    resume: ResumePoint | UnsetType = UNSET
    """Begin where a checkpoint was; unset to begin at step 0."""
    timing: Timing | UnsetType = UNSET
    """Run steps in windows, to time them; such a run has no ladder, and `max_iters` is the timing's."""
    profile: bool = False
    """Leave the timeline of one step (`compare.contract.timeline`)."""

    @property
    def first_step(self) -> int:
        """Number of the run's first step: 0, or where the checkpoint was."""
        return self.resume.step if self.resume else 0

    @property
    def first_loss_scale(self) -> LossScale | None:
        """None if the precision needs none."""
        first = first_scale(self.experiment.precision)
        return (self.resume.loss_scale or first) if first and self.resume else first

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return self.experiment.train.max_iters - self.first_step

    def together(self, step: int) -> int:
        """How many steps run from this one on until the host waits for the devices."""
        return self.timing.window if self.timing and self.timing.is_timed(step) else 1

    def is_in_window(self, step: int) -> bool:
        """Whether a step runs as those do that are timed together: one of them, or the watched one."""
        return bool(self.timing and (self.timing.is_timed(step) or step == self.timing.watched))

    def update_due(self, step: int) -> tuple[Rung, ...]:
        """The rungs of a step: gradients, and moments after it; () of all but the first ones of a ladder."""
        place = step - self.first_step
        if not self.ladder or place >= min(len(UPDATES), self.steps):
            return ()
        gradients, *moments = UPDATES[place]
        return gradients, *moments[: len(moment_names(self.experiment.optimizer))]

    @property
    def weights_due(self) -> dict[int, Rung]:
        """The rung at which weights are taken after a step, by the steps done; {} without a ladder."""
        if not self.ladder:
            return {}
        due = {2: Rung.SECOND_WEIGHTS, self.steps: Rung.FINAL_WEIGHTS}
        due |= {self.later_step: Rung.LATER_WEIGHTS, 1: Rung.FIRST_WEIGHTS}
        return {steps: rung for steps, rung in due.items() if steps <= self.steps}


def decode_request(text: str | bytes, type: type[T], *, source: object) -> T:
    """A request from JSON that stood in `source`. Raises ExperimentError: it is malformed."""
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.DecodeError as error:
        raise ExperimentError(f"{source}: {one_line(error)}") from None


def read_request_file(folder: Path, type: type[T]) -> T:
    """The request in `folder`. Raises ExperimentError: there is none, or it is malformed."""
    path = folder / REQUEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ExperimentError(f"{path}: {error.strerror}: write a request there first") from None
    return decode_request(text, type, source=path)


def read_request(folder: Path, side: str) -> Request:
    """Read `folder/request.json` for a side; the harness has checked that the engine can train it.

    Raises ExperimentError: the request is missing, malformed, or for the other side.
    """
    request = read_request_file(folder, Request)
    known = [name for name, engine in ENGINES.items() if engine.side == side]
    if request.engine not in known:
        raise ExperimentError(f"engine = {request.engine}: {side} runs {', '.join(known)}")
    if request.experiment.checkpoint.every and checkpoints_in(folder / CHECKPOINTS):
        there = f"{folder / CHECKPOINTS} holds checkpoints of an earlier run"
        raise ExperimentError(f"{there}: move them away, or ask for another folder")
    return request


def rungs_asked_for(request: Request) -> tuple[Rung, ...]:
    """The rungs whose tensors a run must leave."""
    if not request.ladder:
        return ()
    asked = {Rung.BATCH, Rung.INITIAL_WEIGHTS, *request.weights_due.values()}
    if request.experiment.model.n_experts:
        asked.add(Rung.ROUTING)
    for place, _ in enumerate(UPDATES):
        asked |= {*request.update_due(request.first_step + place)}
    return tuple(rung for rung in Rung if rung in asked)
