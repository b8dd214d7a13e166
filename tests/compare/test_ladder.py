"""The ladder: it passes equal runs, and fails each difference at its rung."""

import math
import weakref
from collections import UserDict

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from compare.contract.request import Rung
from compare.judge.alone import REQUEST
from compare.judge.errors import relative_error
from compare.judge.rungs import NAMED, RUNGS, Limits
from compare.judge.verdict import Verdict, errors_by_place, first_in_backward
from compare.spec.experiment import edited
from tests.support.records import CLIMBED, climbed, make_record, make_steps, tensors_of

WORST = "blocks.1.mlp.up.weight"


@pytest.fixture
def tiny(tiny):
    """An experiment with a step between the second, whose update is recorded, and the last."""
    return edited(tiny, {"train": {"max_iters": 4}})


@pytest.fixture
def reference(tmp_path, tiny):
    return make_record(tmp_path / "reference", tiny)


def test_equal_runs_pass_every_rung(tmp_path, tiny, reference):
    verdict = climbed(reference, make_record(tmp_path / "same", tiny))
    assert verdict.passed
    assert verdict.sentence() == "PASS"
    assert [result.rung for result in verdict.rungs] == CLIMBED
    assert max(result.error for result in verdict.rungs) < 1e-15


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_late_failure_below_float64_names_rounding(tmp_path, tiny, dtype):
    spec = edited(tiny, {"precision": {"dtype": dtype}})
    steps = make_steps(spec)
    steps[-1] = replace(steps[-1], loss=steps[-1].loss * 1.1)
    right = make_record(tmp_path / "right", spec)
    verdict = climbed(right, make_record(tmp_path / "late", spec, steps=steps))
    assert verdict.failure.rung == "loss_curve"
    assert ("rounding grows" in verdict.sentence()) == (dtype == "float32")


WEIGHTS = (Rung.INITIAL_WEIGHTS, Rung.FIRST_WEIGHTS, Rung.LATER_WEIGHTS)
DAMAGED = {rung: str(rung) for rung in (*WEIGHTS, Rung.GRADIENTS)}
DAMAGED |= dict.fromkeys((Rung.FIRST_M, Rung.FIRST_V), "first_moments")


@pytest.mark.parametrize("rung", DAMAGED)
@pytest.mark.parametrize("damage", ["moved", "nan", "missing", "reshaped"])
def test_damaged_tensor_fails_at_its_rung(tmp_path, tiny, reference, damage, rung):
    tensors = tensors_of(tiny)
    tensor = tensors[rung].pop(WORST).copy()
    if damage == "moved":
        tensor.flat[3] += 1e-3 * np.abs(tensor).max()
    if damage == "nan":
        tensor.flat[3] = np.nan
    if damage != "missing":
        tensors[rung][WORST] = tensor.T if damage == "reshaped" else tensor
    verdict = climbed(reference, make_record(tmp_path / rung, tiny, tensors=tensors))
    found_before = damage in ("missing", "reshaped")  # by the request, which lists the tensors
    assert verdict.failure.rung == (REQUEST if found_before else DAMAGED[rung])
    assert not verdict.result(DAMAGED[rung]).passed
    assert WORST in verdict.failure.worst
    assert WORST in verdict.sentence()
    assert verdict.failure.error == pytest.approx(1e-3 if damage == "moved" else math.inf)
    assert "inf" not in verdict.sentence()


WRONG_WEIGHTS = {
    "opposite": lambda begin, after: 2 * begin - after,
    "unmoved": lambda begin, after: begin,
    "zero": lambda begin, after: np.zeros_like(after),
}


@pytest.mark.parametrize(
    ("dtype", "rung", "wrong"),
    [
        ("float32", Rung.LATER_WEIGHTS, "opposite"),
        ("bfloat16", Rung.LATER_WEIGHTS, "unmoved"),
        ("bfloat16", Rung.FINAL_WEIGHTS, "opposite"),
        ("float16", Rung.FINAL_WEIGHTS, "zero"),
    ],
)
def test_error_is_relative_to_movement(tmp_path, tiny, dtype, rung, wrong):
    spec, tensors = edited(tiny, {"precision": {"dtype": dtype}}), {}
    for name in ("right", "wrong"):
        tensors[name] = tensors_of(spec)
        begin, far = tensors[name][Rung.INITIAL_WEIGHTS][WORST], tensors[name][rung][WORST]
        after = begin + (far - begin) / 1000  # a movement that is small relative to the weight
        tensors[name][rung][WORST] = after if name == "right" else WRONG_WEIGHTS[wrong](begin, after)
    right = make_record(tmp_path / "right", spec, tensors=tensors["right"])
    same = make_record(tmp_path / "same", spec, tensors=tensors["right"])
    assert climbed(right, same).error(rung) == 0
    verdict = climbed(right, make_record(tmp_path / "wrong", spec, tensors=tensors["wrong"]))
    assert not verdict.result(rung).passed


@pytest.mark.parametrize("third", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_key_bias_is_not_compared(tmp_path, tiny, dtype, third):
    spec = edited(tiny, {"precision": {"dtype": dtype}})
    right, name = make_record(tmp_path / "right", spec), "blocks.0.attention.qkv.bias"
    tensors = tensors_of(spec)
    bias = tensors[Rung.LATER_WEIGHTS][name].copy()
    bias[third] *= -1
    tensors[Rung.LATER_WEIGHTS][name] = bias
    failure = climbed(right, make_record(tmp_path / "wrong", spec, tensors=tensors)).failure
    assert failure is None if third == 1 else (failure.rung, failure.worst) == ("later_weights", name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_follows_own_gradients(tmp_path, tiny, subtests, dtype):
    """In both runs of a pair, also where the error is smaller than two runs may differ."""
    spec = edited(tiny, {"precision": {"dtype": dtype}, "optimizer": {"warmup_iters": 0}})
    right, tensors = make_record(tmp_path / "right", spec), tensors_of(spec)
    moment = {name: tensor * np.float32(1 + 5e-6) for name, tensor in tensors[Rung.FIRST_V].items()}
    undecayed = tensors_of(edited(spec, {"optimizer": {"weight_decay": 0.0}}))[Rung.FIRST_WEIGHTS]
    rounded = {
        name: tensor.astype(np.float16).astype(np.float32)
        for name, tensor in tensors[Rung.SECOND_WEIGHTS].items()
    }
    for rung, damaged, worst, step in (
        (Rung.FIRST_V, moment, "v of ", 0),
        (Rung.FIRST_WEIGHTS, undecayed, "blocks.", 0),
        (Rung.SECOND_M, tensors[Rung.FIRST_M], "m of ", 1),
        (Rung.SECOND_WEIGHTS, rounded, "", 1),
    ):
        wrong = make_record(tmp_path / rung, spec, tensors=tensors | {rung: damaged})
        for pair, whose in (((right, wrong), ""), ((wrong, right), "the reference: ")):
            with subtests.test(str(rung), whose=whose):
                failure = climbed(*pair).failure
                assert failure is not None
                assert failure.rung == "updates"
                assert failure.worst.startswith(whose + worst)
                assert "(against its own gradients)" in failure.worst
                assert not step or "after step 1" in failure.worst


@pytest.mark.parametrize("moved", [Rung.FIRST_WEIGHTS, Rung.SECOND_M, None])
def test_skipped_step_moves_nothing(tmp_path, tiny, moved):
    spec = edited(tiny, {"precision": {"dtype": "float16"}})
    tensors, steps = tensors_of(spec), [replace(step, skipped=True) for step in make_steps(spec)]
    tensors[Rung.FIRST_WEIGHTS] = tensors[Rung.SECOND_WEIGHTS] = tensors[Rung.INITIAL_WEIGHTS]
    tensors |= {Rung.SECOND_M: tensors[Rung.FIRST_M], Rung.SECOND_V: tensors[Rung.FIRST_V]}
    if moved:
        decayed = {name: tensor * np.float32(1 - 3e-4) for name, tensor in tensors[moved].items()}
        tensors[moved] = decayed
    record = make_record(tmp_path / "run", spec, tensors=tensors, steps=steps)
    error = climbed(record, record).error("updates")
    assert error == (pytest.approx(3e-4, rel=0.01) if moved else 0.0)


def test_wrong_token_fails_at_batch(tmp_path, tiny, reference):
    tensors = tensors_of(tiny)
    tensors[Rung.BATCH]["targets"] = tensors[Rung.BATCH]["targets"].copy()
    tensors[Rung.BATCH]["targets"][0, 1, 5] += 1
    assert climbed(reference, make_record(tmp_path / "other", tiny, tensors=tensors)).failure.rung == "batch"


@pytest.mark.parametrize("missing", [False, True])
def test_dropout_keys_are_those_of_the_seed(tmp_path, tiny, missing):
    drops = edited(tiny, {"model": {"dropout": 0.2}})
    right, tensors = make_record(tmp_path / "right", drops), tensors_of(drops)
    assert climbed(right, right).passed
    keys = tensors[Rung.BATCH].pop("keys")
    if not missing:
        tensors[Rung.BATCH]["keys"] = keys + np.uint32(1)
    failure = climbed(right, make_record(tmp_path / "wrong", drops, tensors=tensors)).failure
    assert failure.rung == REQUEST
    assert ("keys as missing instead of uint32" if missing else "its dropout keys are not") in failure.worst


SCALARS = {("loss", 0): "loss", ("grad_norm", 0): "grad_norm"}
SCALARS |= {("loss", 2): "loss_curve", ("grad_norm", 2): "norm_curve"}


@pytest.mark.parametrize("value", [1.0, float("nan")])
@pytest.mark.parametrize("place", SCALARS)
def test_wrong_scalar_fails_at_its_rung(tmp_path, tiny, reference, place, value):
    field, step = place
    steps = make_steps(tiny)
    steps[step] = msgspec.structs.replace(steps[step], **{field: value})
    verdict = climbed(reference, make_record(tmp_path / "wrong", tiny, steps=steps))
    assert verdict.failure.rung == (REQUEST if math.isnan(value) else SCALARS[place])
    assert f"step {step}" in verdict.failure.worst
    assert ("diverged" in verdict.sentence()) == math.isnan(value)
    assert not verdict.result(SCALARS[place]).passed


def test_late_norms_of_bfloat16_are_not_compared(tmp_path, tiny):
    spec = edited(tiny, {"precision": {"dtype": "bfloat16"}, "train": {"max_iters": 25}})
    compared = NAMED["norm_curve"].first_steps["bfloat16"]
    right = make_record(tmp_path / "right", spec)

    def verdict_with(step: int) -> Verdict:
        steps = make_steps(spec)
        steps[step] = msgspec.structs.replace(steps[step], grad_norm=2 * steps[step].grad_norm)
        return climbed(right, make_record(tmp_path / str(step), spec, steps=steps))

    assert verdict_with(compared - 1).failure.rung == "norm_curve"
    later = verdict_with(compared)
    assert later.passed
    assert later.result("norm_curve").worst.endswith(f"(only the first {compared} steps were compared)")


def test_unrecorded_rungs_are_skipped(tmp_path, tiny):
    verdict = climbed(*(make_record(tmp_path / name, tiny, tensors={}, ladder=False) for name in "ab"))
    assert verdict.passed
    tensors = {"batch", "gradients", "first_weights", "first_moments", "updates", "later_weights"}
    assert set(verdict.skipped) == tensors
    sgd = edited(tiny, {"optimizer": {"name": "sgd"}})  # without momentum
    verdict = climbed(*(make_record(tmp_path / name, sgd) for name in ("one", "two")))
    assert verdict.passed
    assert verdict.skipped.keys() == {"first_moments"}


def test_different_trainings_are_no_pair(tmp_path, tiny):
    right = make_record(tmp_path / "right", tiny)
    failure = climbed(
        right, make_record(tmp_path / "other", edited(tiny, {"optimizer": {"eps": 1e-6}}))
    ).failure
    assert failure.rung == REQUEST
    assert "optimizer.eps = 1e-06 instead of 1e-08" in failure.worst
    spread = edited(tiny, {"layout": {"dp_replicate": 2}})
    assert climbed(right, make_record(tmp_path / "spread", spread)).passed


def test_error_is_relative_to_largest_entry():
    assert relative_error(np.array([1e-20, 2.0]), np.array([0.0, 2.0])) == pytest.approx(5e-21)
    assert relative_error(np.array([0.5]), np.array([0.0])) == 0.5
    assert math.isinf(relative_error(np.array([np.inf]), np.array([1.0])))
    error = max(errors_by_place(NAMED["gradients"], {"a": np.array([2.0])}, {"a": np.array([1.0])}))
    assert error == (0.5, "a")


def test_gradient_of_rounding_is_no_error():
    """A router's gradient is zero in exact arithmetic if all experts have equal shares."""
    ones = {"blocks.0.mlp.up.weight": np.array([3e-2])}
    errors = errors_by_place(
        NAMED["gradients"], ones | {"r": np.array([7e-19])}, ones | {"r": np.array([3e-19])}
    )
    assert max(errors)[0] < NAMED["gradients"].limits.float64


def test_first_wrong_gradient_in_backward():
    errors = [(1.0, "embedding.token"), (2.0, "blocks.0.norm1.scale"), (0.5, "blocks.1.attention.qkv.weight")]
    right = [(0.0, "blocks.1.mlp.up.weight"), (0.0, "norm.scale")]
    assert first_in_backward(errors + right, 0.1) == "blocks.1.attention.qkv.weight"
    assert first_in_backward(right, 0.1) == ""


def test_one_tensor_is_in_memory_at_a_time():
    alive, most = weakref.WeakSet(), []

    class Tensor(np.ndarray):
        __hash__ = object.__hash__

    class OnDisk(UserDict):
        def __getitem__(self, name):
            alive.add(tensor := np.ones(3).view(Tensor))
            most.append(len(alive))
            return tensor

    on_disk = OnDisk(dict.fromkeys("abcdef"))
    assert max(errors_by_place(NAMED["gradients"], on_disk, on_disk))[0] == 0
    assert max(most) <= 4  # two that are compared, and the two before


def test_limits_of_float64_prove_equality():
    assert max(rung.limits.float64 for rung in RUNGS) <= 1e-10
    assert NAMED["gradients"].limits.float32 <= 1e-5
    assert Limits._fields == ("float64", "float32", "bfloat16", "float16")
