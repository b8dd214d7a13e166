"""Tasks of each device of the pipeline by tick, for a timeline: as `run_pipeline` counts them."""

from functools import partial

from compare.spec.experiment import Layout
from jaxpar.measure.turns_of_work import Schedule, TurnWork


def make_turns(layout: Layout, microbatches: int) -> Schedule:
    """The ticks of a step's microbatches: once forward, then, in a loop of its own, as many backward."""
    ticks = microbatches * layout.chunks + layout.pp - 1
    return Schedule(ticks, partial(_work, layout, microbatches, ticks))


def _work(layout: Layout, microbatches: int, ticks: int, stage: int, turn: int, backward: bool) -> TurnWork:
    begun = (ticks - 1 - turn if backward else turn) - stage
    microbatch = begun // (layout.pp * layout.chunks) * layout.pp + begun % layout.pp
    if begun < 0 or microbatch >= microbatches:
        return TurnWork()  # it computes on what is there, for nothing
    return TurnWork(microbatch, begun // layout.pp % layout.chunks)
