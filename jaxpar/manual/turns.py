"""Tasks of each device of the pipeline by tick, for a timeline."""

from functools import partial

from compare.contract.timeline import Kind
from compare.pipeline.schedules import make_schedule
from compare.pipeline.ticks import BACKWARD, FORWARD, Ticks, lock_step
from compare.spec.experiment import Layout
from jaxpar.measure.turns_of_work import Schedule, TurnWork

KINDS: dict[int, Kind] = {FORWARD: "forward", BACKWARD: "backward"}


def make_turns(layout: Layout, microbatches: int) -> Schedule:
    """The ticks of a step's microbatches, from their table."""
    ticks = lock_step(
        make_schedule(layout.schedule, ranks=layout.pp, microbatches=microbatches, chunks=layout.chunks)
    )
    return Schedule(len(ticks.tasks.kind), partial(_work, ticks))


def _work(ticks: Ticks, rank: int, tick: int, backward: bool) -> TurnWork:
    tasks, at = ticks.tasks, (tick, rank)
    kind = KINDS.get(int(tasks.kind[at]))
    if kind is None:
        return TurnWork()
    return TurnWork(int(tasks.microbatch[at]), int(tasks.stage[at]) // ticks.ranks, kind)
