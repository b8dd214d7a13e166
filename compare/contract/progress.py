"""How far a training has come: the host's part of its state, in both frameworks."""

import math
from dataclasses import dataclass
from typing import NamedTuple, SupportsFloat

from msgspec import UNSET, UnsetType

from compare.contract.ending import DivergedError
from compare.contract.record import Step
from compare.numerics.loss_scale import LossScale, next_scale
from compare.numerics.optimizer import learning_rate
from compare.numerics.stream import Evaluation
from compare.spec.experiment import Experiment


class FinishedStep(NamedTuple):
    """A step that has run: the progress before it, and its numbers."""

    step: int
    updates: int
    loss_scale: LossScale | None
    loss: SupportsFloat
    """A scalar, perhaps still on the device; so is the norm."""
    grad_norm: SupportsFloat

    def record(
        self,
        experiment: Experiment,
        *,
        seconds: float,
        memory: int | UnsetType = UNSET,
        instrumented: bool = False,
    ) -> Step:
        """Its line of the record. A skipped step has a norm of 0."""
        norm = float(self.grad_norm)
        skipped = self.loss_scale is not None and not math.isfinite(norm)
        return Step(
            step=self.step,
            loss=float(self.loss),
            grad_norm=0.0 if skipped else norm,
            lr=learning_rate(experiment.optimizer, self.updates),
            step_time_ms=seconds * 1e3,
            tokens_per_s=experiment.tokens_per_step / seconds if seconds else UNSET,
            memory_bytes=memory,
            instrumented=instrumented,
            loss_scale=self.loss_scale.scale if self.loss_scale else UNSET,
            skipped=skipped,
        )


@dataclass(kw_only=True)
class Progress:
    """How far a training has come.

    Attributes:
        step: the place in the stream of data: the batch to come is `batch(step)`.
        updates: of the weights so far: what the schedule and Adam's bias correction follow.
        loss_scale: what the next step's loss is multiplied by, in float16.
        evaluation: of the weights as they are, where there was one.
    """

    step: int = 0
    updates: int = 0
    loss_scale: LossScale | None = None
    evaluation: Evaluation | None = None

    def finished(self, loss: SupportsFloat, grad_norm: SupportsFloat) -> FinishedStep:
        """The step from here; call it before `move_on`."""
        return FinishedStep(self.step, self.updates, self.loss_scale, loss, grad_norm)

    def move_on(self, engine: str, experiment: Experiment, *, grad_norm: float | None = None) -> bool:
        """After a step, whose norm is needed where there is a loss scale. Returns whether it was skipped.

        Raises:
            DivergedError: gradients overflow at the smallest loss scale.
        """
        skipped = False
        if self.loss_scale is not None:
            assert grad_norm is not None
            skipped = not math.isfinite(grad_norm)
            try:
                self.loss_scale = next_scale(self.loss_scale, experiment.precision, overflowed=skipped)
            except OverflowError as error:
                raise DivergedError(f"{engine} diverged at step {self.step}: its {error}") from None
        self.step += 1
        self.evaluation = None
        self.updates += not skipped
        return skipped
