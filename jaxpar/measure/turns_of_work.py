"""Which microbatch a device works on at a turn of the loop over microbatches, or over a pipeline's ticks.

Known beforehand: an engine's `turns.py` says what its pipeline does.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from compare.contract.timeline import Kind
from compare.spec.axes import PP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, Layout


class TurnWork(NamedTuple):
    """One device's work at a turn."""

    microbatch: int = -1
    """Number of the microbatch; -1: the device is idle."""
    chunk: int = 0
    kind: Kind | None = None
    """Kind of work, if the turn has only one."""


class Schedule(NamedTuple):
    """Work by turns."""

    turns: int
    """Number of the loop's turns; 0 without a loop over microbatches."""
    work: Callable[[int, int, bool], TurnWork]
    """(device, turn, whether the loop is of backward alone) -> its work; of a pipeline's engine by the place
    along pp."""


def make_turns(engine: str, experiment: Experiment) -> Schedule:
    """The loop over microbatches that an engine makes of an experiment.

    Args:
        engine: of this side, or a peer.
        experiment: its layout, and how many passes are accumulated.
    """
    layout, passes = experiment.layout, experiment.train.gradient_accumulation_steps
    if layout.pp == 1:
        return Schedule(passes if passes > 1 else 0, lambda device, turn, backward: TurnWork(turn))
    of_engine = importlib.import_module(f"jaxpar.{ENGINES[engine].folder}.turns")
    turns, work = of_engine.make_turns(layout, passes * layout.microbatches)
    stages = _stages(layout)
    return Schedule(turns, lambda device, turn, backward: work(int(stages[device]), turn, backward))


def _stages(layout: Layout) -> np.ndarray:
    """The place along pp of each device."""
    return np.indices(tuple(layout.axes.values()))[list(layout.axes).index(PP)].ravel()
