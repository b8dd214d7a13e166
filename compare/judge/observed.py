"""Inputs and results of the readers of the rung "strategy" (`compare.judge.strategy`)."""

from typing import NamedTuple

from compare.contract.record import Record
from compare.contract.work import ObservedWork
from compare.spec.engines.engine import Engine
from compare.spec.experiment import Experiment


class Observed(NamedTuple):
    """A record, its observed work, its engine, and the requested experiment."""

    record: Record
    work: ObservedWork
    engine: Engine
    experiment: Experiment

    @property
    def infers_shapes(self) -> bool:
        """True if the observed step is the first of PyTorch's pipeline, which runs and sends more."""
        is_first = self.record.steps[0].instrumented
        return is_first and self.experiment.layout.pp > 1 and self.engine.sends_by == "pytorch"


class Finding(NamedTuple):
    """One setting: its name, the requested value, and the observed one.

    For checks of other facts `asked` is "", and `found` is "" or a description of the fault.
    """

    setting: str
    asked: str
    found: str
