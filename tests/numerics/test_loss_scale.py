"""Loss scaling: the rule, its record, and the comparison of two records."""

import math

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from compare.contract.request import Request, ResumePoint
from compare.judge.alone import REQUEST
from compare.judge.rungs import RUNGS
from compare.numerics.loss_scale import LossScale, first_scale, next_scale
from compare.numerics.optimizer import learning_rate
from compare.side.ending import DivergedError
from compare.side.recording import Progress
from compare.spec.experiment import Experiment, ExperimentError, Precision, edited, revalidate
from compare.spec.sections import LARGEST_LOSS_SCALE
from tests.support.records import climbed, make_record, make_steps

HALF = Precision(
    dtype="float16", loss_scale=64.0, loss_scale_window=3, loss_scale_hysteresis=2, min_loss_scale=16.0
)


def scales(overflows: str, precision: Precision = HALF) -> list[float]:
    """The scale of each step: `x` overflows, `.` does not."""
    scale, found = first_scale(precision), []
    assert scale
    for overflow in overflows:
        found.append(scale.scale)
        scale = next_scale(scale, precision, overflowed=overflow == "x")
    return found


def test_overflow_halves_and_window_doubles():
    assert scales("......") == [64, 64, 64, 128, 128, 128]
    forgiven = scales("..x....")  # the first overflow is forgiven, and the window restarts
    assert forgiven == [64, 64, 64, 64, 64, 64, 128]
    assert scales("xx.xx.") == [64, 64, 32, 32, 32, 16]
    scale = LossScale(scale=64.0, good_steps=5)  # of a training whose window was longer
    assert next_scale(scale, HALF, overflowed=False).scale == 128
    impatient = Precision(dtype="float16", loss_scale=64.0)
    assert scales("xx.", impatient) == [64, 32, 16]


def test_smallest_and_largest_scale():
    with pytest.raises(OverflowError, match="at the smallest loss scale, 16"):
        scales("xxxxx")
    high = LossScale(scale=LARGEST_LOSS_SCALE, good_steps=2)
    assert next_scale(high, HALF, overflowed=False).scale == LARGEST_LOSS_SCALE


def test_skipped_step_counts_for_schedule_only():
    spec = Experiment(precision=HALF)
    state = Progress(loss_scale=first_scale(HALF))
    seen = []
    for norm in (2.0, math.inf, 3.0, math.nan, 1.0):
        seen.append(state.finish_step(5.0, norm).record(spec, seconds=0.1))
        state.advance("jax-manual", spec, grad_norm=norm)
    assert [(one.step, one.skipped, one.loss_scale) for one in seen] == [
        (0, False, 64), (1, True, 64), (2, False, 64), (3, True, 64), (4, False, 32),
    ]  # fmt: skip
    assert [one.grad_norm for one in seen] == [2, 0, 3, 0, 1]
    assert [one.lr for one in seen] == [learning_rate(spec.optimizer, step) for step in range(5)]
    assert (state.step, state.updates) == (5, 3)
    state.loss_scale = LossScale(scale=16.0)
    with pytest.raises(DivergedError, match="jax-manual diverged at step 5: its gradients overflow"):
        state.advance("jax-manual", spec, grad_norm=math.inf)


def test_other_dtypes_have_no_scale():
    spec = Experiment(precision=Precision(dtype="bfloat16"))
    assert first_scale(spec.precision) is None
    step = Progress(step=3, updates=3).finish_step(5.0, math.inf).record(spec, seconds=0.1)
    assert (step.skipped, step.loss_scale, step.grad_norm) == (False, UNSET, math.inf)


@pytest.mark.parametrize(
    ("dtype", "scale", "words"),
    [
        ("bfloat16", 8.0, "precision.dtype = bfloat16 has no loss scale"),
        ("float16", 0.5, "min_loss_scale = 1 is more than precision.loss_scale"),
        ("float16", 2.0**41, "loss_scale"),
    ],
    ids=["bfloat16", "small", "large"],
)
def test_senseless_loss_scale_is_rejected(dtype, scale, words):
    with pytest.raises(ExperimentError, match=words):
        revalidate(Experiment(precision=Precision(dtype=dtype, loss_scale=scale)))


def test_resumed_run_has_the_saved_scale():
    spec = Experiment(precision=HALF)
    assert Request(engine="jax-manual", experiment=spec).first_loss_scale == first_scale(HALF)
    found = LossScale(scale=32.0, good_steps=1)
    resume = ResumePoint(checkpoint="there", step=1, loss_scale=found)
    assert Request(engine="jax-manual", experiment=spec, resume=resume).first_loss_scale == found
    wide = edited(spec, {"precision": {"dtype": "float32"}})
    assert Request(engine="jax-manual", experiment=wide, resume=resume).first_loss_scale is None


def scaled_steps(spec: Experiment, overflows: str) -> list:
    state, found = Progress(loss_scale=first_scale(spec.precision)), []
    for plain, overflow in zip(make_steps(spec), overflows, strict=True):
        norm = math.inf if overflow == "x" else plain.grad_norm
        found.append(state.finish_step(plain.loss, norm).record(spec, seconds=0.1))
        state.advance("", spec, grad_norm=norm)
    return found


def test_loss_scales_of_two_runs_are_equal(tmp_path, tiny):
    spec = edited(tiny, {"precision": {"dtype": "float16", "loss_scale": 64.0}, "train": {"max_iters": 4}})

    def record(name: str, steps: list):
        return make_record(tmp_path / name, spec, steps=steps)

    right = record("right", scaled_steps(spec, ".x.."))
    assert climbed(right, record("same", scaled_steps(spec, ".x.."))).error("loss_scale") == 0
    steps = scaled_steps(spec, "..x.")
    steps[2:] = [replace(step, loss=step.loss * 1.1) for step in steps[2:]]  # of other weights
    other = climbed(right, record("other", steps))
    assert other.failure.rung == "loss_scale"  # and not the losses, which differ for that reason
    assert other.failure.worst == (
        "step 1 was made at scale 64 instead of skipped at scale 64: a gradient near float16's largest "
        "number may overflow in one run only; compare with --precision.loss_scale 1"
    )
    half = edited(spec, {"precision": {"dtype": "float16", "loss_scale": 32.0}})
    lower = climbed(right, make_record(tmp_path / "half", half, steps=scaled_steps(half, ".x..")))
    assert lower.failure.worst == "step 0 was made at scale 32 instead of made at scale 64"

    first = [record(name, scaled_steps(spec, "x...")) for name in ("one", "two")]
    verdict = climbed(*first)
    assert set(verdict.skipped) == {rung.name for rung in RUNGS if rung.needs_update}
    assert "lower precision.loss_scale" in verdict.skipped["gradients"]
    assert verdict.failure is None or verdict.failure.rung != REQUEST
