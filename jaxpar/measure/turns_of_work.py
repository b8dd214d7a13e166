"""Which microbatch a device works on at a turn of the loop over microbatches, or over a pipeline's ticks.

Known beforehand: the schedule is a table (jax-manual), or follows from the number of the tick (jax-compiler).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from compare.contract.axes import PP
from compare.contract.experiment import Experiment, Layout
from compare.contract.schedules import make_schedule
from compare.contract.timeline import Kind
from jaxpar.manual.pipeline.ticks import BACKWARD, FORWARD, Ticks, lock_step

KINDS: dict[int, Kind] = {FORWARD: "forward", BACKWARD: "backward"}


class Work(NamedTuple):
    """What a device does at a turn."""

    microbatch: int = -1
    """-1 for none: the device is idle."""
    chunk: int = 0
    kind: Kind | None = None
    """If it does one thing alone."""


class Schedule(NamedTuple):
    """Work by turns."""

    turns: int
    """Of the loop; 0 if there is none over microbatches."""
    work: Callable[[int, int, bool], Work]
    """(device, turn, whether the loop is of backward alone) -> its work."""


def make_turns(engine: str, experiment: Experiment) -> Schedule:
    """The loop over microbatches that an engine makes of an experiment.

    Args:
        engine: jax-manual or jax-compiler.
        experiment: its layout, and how many passes are accumulated.
    """
    layout, passes = experiment.layout, experiment.train.gradient_accumulation_steps
    if layout.pp == 1:
        return Schedule(passes if passes > 1 else 0, lambda device, turn, backward: Work(turn))
    count = passes * layout.microbatches
    names, sizes = list(layout.axes), tuple(layout.axes.values())
    stages = np.indices(sizes)[names.index(PP)].ravel()
    if engine == "jax-manual":
        ticks = lock_step(
            make_schedule(layout.schedule, ranks=layout.pp, microbatches=count, chunks=layout.chunks)
        )
        return Schedule(len(ticks.tasks.kind), partial(_of_ticks, ticks, stages))
    return Schedule(_rolls(layout, count), partial(_of_rolls, layout, count, stages))


def _of_ticks(ticks: Ticks, stages: np.ndarray, device: int, turn: int, backward: bool) -> Work:
    """From the table of `jaxpar.manual.pipeline.ticks`."""
    at = turn, int(stages[device])
    kind = KINDS.get(int(ticks.tasks.kind[at]))
    if kind is None:
        return Work()
    return Work(int(ticks.tasks.microbatch[at]), int(ticks.tasks.stage[at]) // ticks.ranks, kind)


def _of_rolls(layout: Layout, count: int, stages: np.ndarray, device: int, turn: int, backward: bool) -> Work:
    """As `jaxpar.compiler.pipeline_parallel.run_pipeline` counts; its derivative goes backwards."""
    turns = _rolls(layout, count)
    begun = (turns - 1 - turn if backward else turn) - int(stages[device])
    microbatch = begun // (layout.pp * layout.chunks) * layout.pp + begun % layout.pp
    if begun < 0 or microbatch >= count:
        return Work()
    return Work(microbatch, begun // layout.pp % layout.chunks)


def _rolls(layout: Layout, count: int) -> int:
    return count * layout.chunks + layout.pp - 1
