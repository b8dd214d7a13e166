"""Timelines: unions, overlap, idle time, bubbles, and which step is watched; against times set by hand."""

import numpy as np
import pytest

from compare.contract.timeline import (
    COMPUTE,
    Lane,
    Span,
    Timeline,
    bubble_fraction,
    busy_us,
    exposed_us,
    idle_us,
    profiled_step,
)
from compare.pipeline.schedules import Kind, make_schedule
from compare.pipeline.simulator import bubble_fraction as planned
from compare.pipeline.simulator import run


def span(kind, begin, end, **more):
    return Span(kind=kind, name=kind, begin_us=begin, duration_us=end - begin, **more)


def test_unions_equal_counted_ticks():
    """Spans at random, whose unions are counted tick by tick."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        ticks = {"communication": np.zeros(200, bool), "compute": np.zeros(200, bool)}
        spans = []
        for kind in draw.choice(["forward", "backward", "update", "communication"], 12):
            begin, length = int(draw.integers(0, 150)), int(draw.integers(0, 50))
            spans.append(span(str(kind), begin, begin + length))
            ticks["communication" if kind == "communication" else "compute"][begin : begin + length] = True
        lane = Lane(device=0, spans=spans)
        assert busy_us(lane, "communication") == ticks["communication"].sum()
        assert exposed_us(lane) == (ticks["communication"] & ~ticks["compute"]).sum()
        assert idle_us(lane, 200) == (~(ticks["communication"] | ticks["compute"])).sum()
        assert busy_us(lane, *COMPUTE) == ticks["compute"].sum()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_bubble_of_an_exact_run_is_planned(name):
    schedule = make_schedule(name, ranks=4, microbatches=8, chunks=2 if name == "interleaved" else 1)
    lanes = [Lane(device=rank, spans=[]) for rank in range(4)]
    for rank, task, begin, end in run(schedule):
        kind = "forward" if task.kind == Kind.FORWARD else "backward"
        lanes[rank].spans.append(span(kind, 100 + begin, 100 + end, microbatch=task.microbatch))
    lanes[0].spans.append(span("update", 500, 600))  # not in the pipeline
    timeline = Timeline(step=3, wall_us=600, lanes=lanes)
    assert bubble_fraction(timeline) == pytest.approx(planned(schedule), abs=1e-12)
    without_microbatches = Lane(device=0, spans=[span("forward", 0, 1)])
    assert bubble_fraction(Timeline(step=3, wall_us=1, lanes=[without_microbatches])) is None


def test_profiled_step_avoids_instruments():
    for *run_of, watched in ((0, 20, 2, 3), (10, 20, 12, 13), (0, 3, 2, 1), (0, 2, 1, 0), (7, 1, 7, 7)):
        assert profiled_step(*run_of) == watched
