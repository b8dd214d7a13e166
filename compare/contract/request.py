"""Request of the harness to an engine, RUN_DIR/request.json, with the tensors that the engine must record."""

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
    """Recorded tensors of the ladder, in the order in which they arise."""

    BATCH = "batch"
    """`inputs` and `targets` (A, B, T) of the first step as the devices received them, gathered in order."""
    INITIAL_WEIGHTS = "initial_weights"
    ROUTING = "routing"
    """`experts` (L, A, B, T, k), int32, of a model with experts: the experts of each token of the first step,
    in ascending order, gathered as `BATCH`. In every step a side also counts the tokens of each expert
    (`record.Step.tokens_per_expert`)."""
    GRADIENTS = "gradients"
    """Gradients of the first step's mean loss over the global batch, synchronised, before clipping."""
    FIRST_WEIGHTS = "first_weights"
    """Weights after the first optimizer step."""
    FIRST_M = "first_m"
    """First moments (SGD: momentum buffer) after the first optimizer step."""
    FIRST_V = "first_v"
    """Second moments after the first optimizer step."""
    SECOND_GRADIENTS = "second_gradients"
    """Gradients of the second step."""
    SECOND_WEIGHTS = "second_weights"
    """Weights after the second optimizer step, unless one of the next two rungs has them."""
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
"""Recorded gradients and moments of the first two steps. The second step is the first with nonzero moments
and another bias correction."""
MOMENTS = {rung: name for _, *rungs in UPDATES for rung, name in zip(rungs, "mv", strict=True)}
"""Name of the moment that a rung records (`compare.numerics.optimizer.moment_names`)."""


class ResumePoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoint whose state a run loads."""

    checkpoint: str
    """Folder of the checkpoint, an absolute path."""
    step: int
    """Number of batches drawn before the checkpoint: the run starts with `batch(step)`."""
    loss_scale: LossScale | UnsetType = UNSET


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `python -m SIDE RUN_DIR` needs."""

    engine: str
    experiment: Experiment
    platform: Platform = "cpu"
    ladder: bool = False
    """Record the tensors of the ladder (`Rung`)."""
    later_step: int = 20
    """Number of optimizer steps before `Rung.LATER_WEIGHTS`; at most all of them."""
    corpus_sha256: str = ""
    """Digest of data that the harness has validated; if empty, the engine validates the data."""
    timeout_s: float = 600.0
    """Seconds without any progress after which the run counts as hung."""
    cache_dir: str = ""
    """Folder for JAX's compiled programs between runs; empty for none."""
    init_from: str = ""
    """Absolute path of safetensors with the first weights, by canonical name; empty for the seed's
    weights."""
    init_sha256: str = ""
    """`fingerprint` of these weights in the dtype of training; empty if unknown."""
    resume: ResumePoint | UnsetType = UNSET
    """Checkpoint to begin with; unset to begin at step 0."""
    continues: ResumePoint | UnsetType = UNSET
    """Own checkpoint of this run, which was stopped; the folder has the record up to its step."""
    timing: Timing | UnsetType = UNSET
    """Windows of timed steps. A timed run has no ladder, and its timing sets `max_iters`."""
    profile: bool = False
    """Record the timeline of one step (`compare.contract.timeline`)."""
    trace: bool = False
    """Record the output of each place of the model in the first step, and its gradient
    (`compare.contract.trace`)."""

    @property
    def first_step(self) -> int:
        """Number of the record's first step: 0, or the step of the checkpoint to begin with."""
        return self.resume.step if self.resume else 0

    @property
    def state(self) -> ResumePoint | UnsetType:
        """Checkpoint to load; unset to begin with the first weights."""
        return self.continues or self.resume

    @property
    def next_step(self) -> int:
        """Number of the first step that the processes compute."""
        return self.state.step if self.state else 0

    @property
    def first_loss_scale(self) -> LossScale | None:
        """First loss scale; None without float16."""
        first = first_scale(self.experiment.precision)
        return (self.state.loss_scale or first) if first and self.state else first

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return self.experiment.train.max_iters - self.first_step

    def together(self, step: int) -> int:
        """Number of steps from this step until the host waits for the devices."""
        return self.timing.window if self.timing and self.timing.is_timed(step) else 1

    def is_in_window(self, step: int) -> bool:
        """Whether a step is part of a timed window, or the watched step, which runs in the same way."""
        return bool(self.timing and (self.timing.is_timed(step) or step == self.timing.watched))

    def update_due(self, step: int) -> tuple[Rung, ...]:
        """Rungs of a step: gradients, and moments after the step. () without a ladder and after the first
        steps."""
        place = step - self.first_step
        if not self.ladder or place >= min(len(UPDATES), self.steps):
            return ()
        gradients, *moments = UPDATES[place]
        return gradients, *moments[: len(moment_names(self.experiment.optimizer))]

    @property
    def weights_due(self) -> dict[int, Rung]:
        """Rung of the weights by number of finished steps; {} without a ladder."""
        if not self.ladder:
            return {}
        due = {2: Rung.SECOND_WEIGHTS, self.steps: Rung.FINAL_WEIGHTS}
        due |= {self.later_step: Rung.LATER_WEIGHTS, 1: Rung.FIRST_WEIGHTS}
        return {steps: rung for steps, rung in due.items() if steps <= self.steps}


def decode_request(text: str | bytes, type: type[T], *, source: object) -> T:
    """Decode a request from the JSON of `source`. Raises ExperimentError for malformed JSON."""
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.DecodeError as error:
        raise ExperimentError(f"{source}: {one_line(error)}") from None


def read_request_file(folder: Path, type: type[T]) -> T:
    """Read the request in `folder`. Raises ExperimentError for a missing or malformed file."""
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
    saves = request.experiment.checkpoint.every and not request.continues
    if saves and checkpoints_in(folder / CHECKPOINTS):
        there = f"{folder / CHECKPOINTS} holds checkpoints of an earlier run"
        raise ExperimentError(f"{there}: move them away, or ask for another folder")
    return request


def rungs_asked_for(request: Request) -> tuple[Rung, ...]:
    """Rungs whose tensors a run must record."""
    if not request.ladder:
        return ()
    asked = {Rung.BATCH, Rung.INITIAL_WEIGHTS, *request.weights_due.values()}
    if request.experiment.model.n_experts:
        asked.add(Rung.ROUTING)
    for place, _ in enumerate(UPDATES):
        asked |= {*request.update_due(request.first_step + place)}
    return tuple(rung for rung in Rung if rung in asked)
