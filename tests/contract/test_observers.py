"""Observers of a training: whom the loop tells, what they write and when, without a framework."""

import math
from collections.abc import Collection
from contextlib import contextmanager

import numpy as np
import pytest
from msgspec.structs import replace

from compare.contract.ending import DivergedError
from compare.contract.observers import FinishedStep, Observer, Observers
from compare.contract.progress import Progress, ProgressSnapshot
from compare.contract.record import EVALUATIONS, STEPS_PART, Recorder, read_steps, read_tensors
from compare.contract.recording import Evaluating, Ladder, Steps
from compare.contract.request import Request, Rung, rungs_asked_for
from compare.contract.timing import Stopwatch, Timing, Window
from compare.host.facts import MemoryUse
from compare.numerics.evaluation import Evaluation, steps_due

ONE = Window(steps=1, wall_s=0.5, cpu_s=0.25)


def done(step: int, loss: float = 1.0, norm: float = 2.0) -> FinishedStep:
    return FinishedStep(ProgressSnapshot(step=step, updates=step), loss, norm)


class SideOf:
    """A side that notes what it is asked for."""

    devices: Collection[int] = (0,)
    corpus_sha256 = ""

    def __init__(self, request: Request):
        self.request, self.asked = request, list[object]()

    def memory(self) -> MemoryUse:
        return MemoryUse(now=1, peak=2)

    def not_finite(self) -> str:
        return "here"

    def tensors(self, rung: Rung) -> dict[str, np.ndarray]:
        self.asked.append(rung)
        return {"w": np.ones(2)}

    def evaluate(self, step: int) -> Evaluation:
        self.asked.append(step)
        return Evaluation(step=step, train=1.0, validation=2.0)

    def parts(self) -> list:
        return []

    def costs(self, windows, recorder) -> dict:
        return {}


def test_all_are_told_in_their_order_and_nested_around_a_step():
    told = []

    class Noted(Observer):
        def __init__(self, name: str):
            self.name = name

        @contextmanager
        def around(self, step: int):
            told.append(f"{self.name} enters {step}")
            yield
            told.append(f"{self.name} leaves")

        def gradients(self, step: int) -> None:
            told.append(f"{self.name} gradients")

    tell = Observers([Noted("a"), Observer(), Noted("b")])
    with tell.around(3):
        tell.gradients(3)
    assert told == ["a enters 3", "b enters 3", "a gradients", "b gradients", "b leaves", "a leaves"]


def test_steps_are_written_with_their_share_of_the_time(tiny, tmp_path):
    timing = Timing(warmup=3, window=2, windows=1, single=1)
    request = Request(engine="torch-manual", experiment=tiny, timing=timing)
    other = Observer()
    other.watched = 2
    steps = Steps(SideOf(request), Recorder(tmp_path), [other])
    for step in range(3):
        steps.steps([done(step)], ONE)
    window = Window(steps=2, wall_s=3.0, cpu_s=1.0)
    steps.steps([done(3), done(4)], window)
    steps.steps([done(5)], ONE)
    lines = read_steps(tmp_path / STEPS_PART)
    assert [line.step_time_ms for line in lines] == [500, 500, 500, 1500, 1500, 500]
    assert [line.instrumented for line in lines] == [False, False, True, False, False, False]
    assert (steps.first_step_s, steps.windows) == (0.5, [window])


def test_a_step_that_is_not_finite_is_written_and_ends_the_run(tiny, tmp_path):
    steps = Steps(SideOf(Request(engine="torch-manual", experiment=tiny)), Recorder(tmp_path))
    with pytest.raises(DivergedError, match="step 0: its gradient norm is inf; here"):
        steps.steps([done(0, norm=math.inf)], ONE)
    assert len(read_steps(tmp_path / STEPS_PART)) == 1


@pytest.mark.parametrize("writes", [True, False])
def test_a_ladder_leaves_the_rungs_that_are_asked_for(tiny, tmp_path, writes):
    request = Request(engine="torch-manual", experiment=tiny, ladder=True, later_step=2)
    side = SideOf(request)
    ladder = Ladder(side, Recorder(tmp_path) if writes else None)
    ladder.begin(Progress())
    for step in range(request.steps):
        ladder.gradients(step)
        ladder.steps([done(step)], ONE)
    assert sorted(map(str, side.asked)) == sorted(rungs_asked_for(request))
    assert all(bool(read_tensors(tmp_path, rung)) == writes for rung in rungs_asked_for(request))


def test_weights_are_evaluated_where_that_is_due(tiny, tmp_path):
    experiment = replace(tiny, train=replace(tiny.train, max_iters=5, eval_interval=2))
    side, progress = SideOf(Request(engine="torch-manual", experiment=experiment)), Progress()
    observer = Evaluating(side, Recorder(tmp_path))
    observer.begin(progress)
    for step in range(1, 6):
        progress.move_on("torch-manual", experiment)
        observer.between(progress)
        assert bool(progress.evaluation) == (step in steps_due(experiment))
    assert side.asked == steps_due(experiment) == [0, 2, 4, 5]
    assert len((tmp_path / EVALUATIONS).read_text().splitlines()) == 4


def test_a_stopwatch_adds_up_only_what_it_was_entered_for():
    times = iter([1.0, 3.0, 10.0, 11.5])
    clock = Stopwatch(lambda: next(times))
    for _ in range(2):
        with clock:
            pass
    assert clock.window(2).wall_s == 3.5
