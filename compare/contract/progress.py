"""How far a training has come: the host's part of its state, in both frameworks."""

import math
from dataclasses import dataclass

from msgspec import UNSET, Struct

from compare.contract.ending import DivergedError
from compare.contract.record import Step
from compare.host.facts import MemoryUse
from compare.numerics.evaluation import Evaluation
from compare.numerics.learning_rate import learning_rate
from compare.numerics.loss_scale import LossScale, next_scale
from compare.spec.experiment import Experiment


class ProgressSnapshot(Struct, frozen=True, kw_only=True):
    """Progress of a training before a step, frozen."""

    step: int
    updates: int
    loss_scale: LossScale | None = None

    def overflowed(self, grad_norm: float) -> bool:
        """Whether the step from here, whose gradients have this norm, was skipped."""
        return self.loss_scale is not None and not math.isfinite(grad_norm)

    def record(
        self,
        experiment: Experiment,
        *,
        loss: float,
        grad_norm: float,
        seconds: float,
        memory: MemoryUse | None = None,
        instrumented: bool = False,
    ) -> Step:
        """The line of the record for the step from here. A skipped step has a norm of 0."""
        skipped = self.overflowed(grad_norm)
        return Step(
            step=self.step,
            loss=loss,
            grad_norm=0.0 if skipped else grad_norm,
            lr=learning_rate(experiment.optimizer, self.updates),
            step_time_ms=seconds * 1e3,
            tokens_per_s=experiment.tokens_per_step / seconds if seconds else UNSET,
            memory_bytes=memory.now if memory else UNSET,
            peak_memory_bytes=memory.peak if memory else UNSET,
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

    @property
    def snapshot(self) -> ProgressSnapshot:
        """A frozen copy."""
        return ProgressSnapshot(step=self.step, updates=self.updates, loss_scale=self.loss_scale)

    def move_on(self, engine: str, experiment: Experiment, *, grad_norm: float | None = None) -> None:
        """After a step, whose norm is needed where there is a loss scale.

        Raises:
            DivergedError: gradients overflow at the smallest loss scale.
        """
        skipped = False
        if self.loss_scale is not None:
            assert grad_norm is not None
            skipped = self.snapshot.overflowed(grad_norm)
            try:
                self.loss_scale = next_scale(self.loss_scale, experiment.precision, overflowed=skipped)
            except OverflowError as error:
                raise DivergedError(f"{engine} diverged at step {self.step}: its {error}") from None
        self.step += 1
        self.evaluation = None
        self.updates += not skipped
