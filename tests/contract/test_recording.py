"""The recording of a training: files and their times, without a framework."""

import math
from collections.abc import Collection
from contextlib import contextmanager

import numpy as np
import pytest
from msgspec.structs import replace

from compare.contract.record import EVALUATIONS, STEPS_PART, Recorder, Step, read_lines, read_tensors
from compare.contract.request import Request, Rung, rungs_asked_for
from compare.contract.timing import Stopwatch, Timing, Window
from compare.numerics.context import order_of_positions
from compare.numerics.stream import Evaluation, steps_due
from compare.side.ending import DivergedError
from compare.side.recording import FinishedStep, Observer, Progress, Recording

ONE = Window(steps=1, wall_s=0.5, cpu_s=0.25)


def done(step: int, loss: float = 1.0, norm: float = 2.0) -> FinishedStep:
    return FinishedStep(step, None, loss, norm)


class FakeSide:
    """A side that lists the calls of its recording."""

    devices: Collection[int] = (0,)
    corpus_sha256 = initial_weights_sha256 = ""

    def __init__(self, request: Request):
        self.request, self.asked = request, list[object]()

    def memory(self) -> int:
        return 1

    def describe_non_finite(self) -> str:
        return "here"

    def tensors(self, rung: Rung) -> dict[str, np.ndarray]:
        self.asked.append(rung)
        length = self.request.experiment.model.block_size
        return {"w": np.broadcast_to(np.arange(length)[:, None, None], (1, 1, length, length, 2))}

    def evaluate(self, step: int) -> Evaluation:
        self.asked.append(step)
        return Evaluation(step=step, train=1.0, validation=2.0)

    def checkpoint_parts(self) -> list:
        return []

    def should_stop(self) -> bool:
        return False

    def manifest_fields(self, windows, recorder) -> dict:
        self.asked.append(windows)
        return {}


def test_observer_watches_one_step(tiny, tmp_path):
    told = []

    class Noted(Observer):
        watched = 3

        @contextmanager
        def watch(self):
            told.append("enters")
            yield
            told.append("leaves")

        def gradients(self, step: int) -> None:
            told.append(step)

    tell = Recording(FakeSide(Request(engine="torch-manual", experiment=tiny)), None, tmp_path, [Noted()])
    for step in (2, 3):
        with tell.around(step):
            tell.gradients(step)
    assert told == [2, "enters", 3, "leaves"]


def test_window_time_is_shared_by_its_steps(tiny, tmp_path):
    timing = Timing(warmup=3, window=2, windows=1, single=1)
    side = FakeSide(Request(engine="torch-manual", experiment=tiny, timing=timing))
    other = Observer()
    other.watched = 2
    tell = Recording(side, Recorder(tmp_path), tmp_path, [other])
    for step in range(3):
        tell.steps([done(step)], ONE)
    window = Window(steps=2, wall_s=3.0, cpu_s=1.0)
    tell.steps([done(3), done(4)], window)
    tell.steps([done(5)], ONE)
    lines = read_lines(tmp_path / STEPS_PART, Step)
    assert [line.step_time_ms for line in lines] == [500, 500, 500, 1500, 1500, 500]
    assert [line.instrumented for line in lines] == [False, False, True, False, False, False]
    with pytest.raises(TypeError, match="device_kind"):  # the fake side has no manifest fields
        tell.finish()
    assert side.asked == [[window]]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"norm": math.inf}, "its gradient norm is inf"),
        ({"loss": math.nan}, "its loss is nan"),
        ({"loss": math.inf, "norm": math.nan}, "its loss is inf and its gradient norm is nan"),
    ],
)
def test_non_finite_step_is_written_and_raises(numbers, message, tiny, tmp_path):
    side = FakeSide(Request(engine="torch-manual", experiment=tiny))
    with pytest.raises(DivergedError, match=f"^torch-manual diverged at step 0: {message}; here$"):
        Recording(side, Recorder(tmp_path), tmp_path).steps([done(0, **numbers)], ONE)
    assert len(read_lines(tmp_path / STEPS_PART, Step)) == 1


@pytest.mark.parametrize("writes", [True, False])
def test_ladder_writes_the_requested_rungs(tiny, tmp_path, writes):
    request = Request(engine="torch-manual", experiment=tiny, ladder=True, later_step=2)
    side = FakeSide(request)
    tell = Recording(side, Recorder(tmp_path) if writes else None, tmp_path)
    tell.begin(Progress())
    for step in range(request.steps):
        tell.gradients(step)
        tell.steps([done(step)], ONE)
    assert sorted(map(str, side.asked)) == sorted(rungs_asked_for(request))
    assert all(bool(read_tensors(tmp_path, rung)) == writes for rung in rungs_asked_for(request))


def test_tokens_are_written_in_the_order_of_the_sequence(tiny, tmp_path):
    """A device has positions in the requested order. An engine that ignores zigzag has other tokens there."""
    experiment = replace(tiny, layout=replace(tiny.layout, cp=2, zigzag=True))
    side = FakeSide(Request(engine="torch-manual", experiment=experiment, ladder=True))
    Recording(side, Recorder(tmp_path), tmp_path).begin(Progress())
    order_T = order_of_positions(tiny.model.block_size, experiment.layout)
    written = read_tensors(tmp_path, Rung.BATCH)["w"][0, 0, :, 0, 0]
    assert (written[order_T] == np.arange(tiny.model.block_size)).all()
    assert (written != np.arange(tiny.model.block_size)).any()


def test_evaluation_is_written_when_due(tiny, tmp_path):
    experiment = replace(tiny, train=replace(tiny.train, max_iters=5, eval_interval=2))
    side, progress = FakeSide(Request(engine="torch-manual", experiment=experiment)), Progress()
    tell = Recording(side, Recorder(tmp_path), tmp_path)
    tell.begin(progress)
    for step in range(1, 6):
        progress.advance("torch-manual", experiment)
        tell.between(progress)
        assert bool(progress.evaluation) == (step in steps_due(experiment))
    assert side.asked == steps_due(experiment) == [0, 2, 4, 5]
    assert len((tmp_path / EVALUATIONS).read_text().splitlines()) == 4


def test_stopwatch_adds_its_blocks():
    times = iter([1.0, 3.0, 10.0, 11.5])
    clock = Stopwatch(lambda: next(times))
    for _ in range(2):
        with clock:
            pass
    assert clock.window(2).wall_s == 3.5
