"""The ladder itself: it must pass equal runs, and turn red at the right rung for every difference."""

import math
import weakref
from collections import UserDict

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from compare.contract.request import Rung
from compare.judge.ladder import LADDER, REQUEST, Verdict, climb
from compare.judge.tensor_errors import relative_error, worst_tensor
from compare.judge.tolerances import TOLERANCES
from compare.spec.experiment import edited
from tests.support.records import CLIMBED, make_record, make_steps, tensors_of

WORST = "blocks.1.mlp.up.weight"


@pytest.fixture
def tiny(tiny):
    """With a step between the second, whose update is kept, and the last."""
    return edited(tiny, {"train": {"max_iters": 4}})


@pytest.fixture
def reference(tmp_path, tiny):
    return make_record(tmp_path / "reference", tiny)


def test_equal_runs_pass_every_rung(tmp_path, tiny, reference):
    verdict = climb(reference, make_record(tmp_path / "same", tiny))
    assert verdict.passed
    assert verdict.sentence() == "PASS"
    assert [result.rung for result in verdict.rungs] == CLIMBED
    assert max(result.error for result in verdict.rungs) < 1e-15


WEIGHTS = (Rung.INITIAL_WEIGHTS, Rung.FIRST_WEIGHTS, Rung.LATER_WEIGHTS)
DAMAGED = {rung: str(rung) for rung in (*WEIGHTS, Rung.GRADIENTS)}
DAMAGED |= dict.fromkeys((Rung.FIRST_M, Rung.FIRST_V), "first_moments")


@pytest.mark.parametrize("damage", ["moved", "nan", "missing", "reshaped"])
def test_damage_to_one_tensor_is_named_at_its_rung(tmp_path, tiny, reference, damage):
    for rung, expected in DAMAGED.items():
        tensors = tensors_of(tiny)
        tensor = tensors[rung].pop(WORST).copy()
        if damage == "moved":
            tensor.flat[3] += 1e-3 * np.abs(tensor).max()
        if damage == "nan":
            tensor.flat[3] = np.nan
        if damage != "missing":
            tensors[rung][WORST] = tensor.T if damage == "reshaped" else tensor
        verdict = climb(reference, make_record(tmp_path / rung, tiny, tensors=tensors))
        found_before = damage in ("missing", "reshaped")  # the request says which tensors there are
        assert verdict.failure.rung == (REQUEST if found_before else expected)
        assert expected in [result.rung for result in verdict.rungs if not result.passed]
        assert WORST in verdict.failure.worst
        assert WORST in verdict.sentence()
        assert verdict.failure.error == pytest.approx(1e-3 if damage == "moved" else math.inf)
        assert "inf" not in verdict.sentence()


WRONG_WEIGHTS = {
    "turned round": lambda begin, after: 2 * begin - after,
    "as they began": lambda begin, after: begin,
    "zero": lambda begin, after: np.zeros_like(after),
}


@pytest.mark.parametrize(
    ("dtype", "rung", "wrong"),
    [
        ("float32", Rung.LATER_WEIGHTS, "turned round"),
        ("bfloat16", Rung.LATER_WEIGHTS, "as they began"),
        ("bfloat16", Rung.FINAL_WEIGHTS, "turned round"),
        ("float16", Rung.FINAL_WEIGHTS, "zero"),
    ],
)
def test_below_float64_weights_are_held_to_how_far_they_moved(tmp_path, tiny, dtype, rung, wrong):
    spec, tensors = edited(tiny, {"precision": {"dtype": dtype}}), {}
    for name in ("right", "wrong"):
        tensors[name] = tensors_of(spec)
        begin, far = tensors[name][Rung.INITIAL_WEIGHTS][WORST], tensors[name][rung][WORST]
        after = begin + (far - begin) / 1000  # little beside the weight itself
        tensors[name][rung][WORST] = after if name == "right" else WRONG_WEIGHTS[wrong](begin, after)
    right = make_record(tmp_path / "right", spec, tensors=tensors["right"])
    same = make_record(tmp_path / "same", spec, tensors=tensors["right"])
    assert climb(right, same).error(rung) == 0
    verdict = climb(right, make_record(tmp_path / "wrong", spec, tensors=tensors["wrong"]))
    assert rung in [result.rung for result in verdict.rungs if not result.passed]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_of_a_bias_of_attention_the_key_s_third_alone_is_left_out(tmp_path, tiny, dtype):
    spec = edited(tiny, {"precision": {"dtype": dtype}})
    right, name = make_record(tmp_path / "right", spec), "blocks.0.attention.qkv.bias"
    for third, passes in enumerate((False, True, False)):
        tensors = tensors_of(spec)
        bias = tensors[Rung.LATER_WEIGHTS][name].copy()
        bias[third] *= -1
        tensors[Rung.LATER_WEIGHTS][name] = bias
        verdict = climb(right, make_record(tmp_path / str(third), spec, tensors=tensors))
        assert (verdict.failure is None) == passes
        assert passes or (verdict.failure.rung, verdict.failure.worst) == ("later_weights", name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_below_float64_an_update_is_held_to_the_optimizer_in_the_reference_too(tmp_path, tiny, dtype):
    """It may be off by more than two runs may be apart."""
    spec = edited(tiny, {"precision": {"dtype": dtype}, "optimizer": {"warmup_iters": 0}})
    right, tensors = make_record(tmp_path / "right", spec), tensors_of(spec)
    moment = {name: tensor * np.float32(1 + 5e-6) for name, tensor in tensors[Rung.FIRST_V].items()}
    undecayed = tensors_of(edited(spec, {"optimizer": {"weight_decay": 0.0}}))[Rung.FIRST_WEIGHTS]
    rounded = {
        name: tensor.astype(np.float16).astype(np.float32)
        for name, tensor in tensors[Rung.SECOND_WEIGHTS].items()
    }
    for rung, damaged, worst in (
        (Rung.FIRST_V, moment, "v of "),
        (Rung.FIRST_WEIGHTS, undecayed, "blocks."),
        (Rung.SECOND_M, tensors[Rung.FIRST_M], "m of "),
        (Rung.SECOND_WEIGHTS, rounded, ""),
    ):
        wrong = make_record(tmp_path / rung, spec, tensors=tensors | {rung: damaged})
        for pair, whose in (((right, wrong), ""), ((wrong, right), "the reference's ")):
            failure = climb(*pair).failure
            assert failure is not None
            assert failure.rung == "updates"
            assert failure.worst.startswith(whose + worst)
            assert "after step 1, against" in failure.worst or rung in (Rung.FIRST_V, Rung.FIRST_WEIGHTS)


@pytest.mark.parametrize("moved", [Rung.FIRST_WEIGHTS, Rung.SECOND_M, None])
def test_a_skipped_step_moves_neither_weights_nor_moments(tmp_path, tiny, moved):
    spec = edited(tiny, {"precision": {"dtype": "float16"}})
    tensors, steps = tensors_of(spec), [replace(step, skipped=True) for step in make_steps(spec)]
    tensors[Rung.FIRST_WEIGHTS] = tensors[Rung.SECOND_WEIGHTS] = tensors[Rung.INITIAL_WEIGHTS]
    tensors |= {Rung.SECOND_M: tensors[Rung.FIRST_M], Rung.SECOND_V: tensors[Rung.FIRST_V]}
    if moved:
        decayed = {name: tensor * np.float32(1 - 3e-4) for name, tensor in tensors[moved].items()}
        tensors[moved] = decayed
    record = make_record(tmp_path / "run", spec, tensors=tensors, steps=steps)
    error = climb(record, record).error("updates")
    assert error == (pytest.approx(3e-4, rel=0.01) if moved else 0.0)


def test_a_wrong_token_fails_at_the_batch(tmp_path, tiny, reference):
    tensors = tensors_of(tiny)
    tensors[Rung.BATCH]["targets"] = tensors[Rung.BATCH]["targets"].copy()
    tensors[Rung.BATCH]["targets"][0, 1, 5] += 1
    assert climb(reference, make_record(tmp_path / "other", tiny, tensors=tensors)).failure.rung == "batch"


def test_keys_of_dropout_are_those_that_were_asked_for(tmp_path, tiny):
    drops = edited(tiny, {"model": {"dropout": 0.2}})
    right, tensors = make_record(tmp_path / "right", drops), tensors_of(drops)
    assert climb(right, right).passed
    keys = tensors[Rung.BATCH].pop("keys")
    for given, says in (
        ({"keys": keys + np.uint32(1)}, "its dropout keys are not those"),
        ({}, "have keys as nothing instead of uint32"),
    ):
        batch = {Rung.BATCH: tensors[Rung.BATCH] | given}
        failure = climb(right, make_record(tmp_path / says, drops, tensors=tensors | batch)).failure
        assert failure.rung == REQUEST
        assert says in failure.worst


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_wrong_scalar_fails_at_its_rung(tmp_path, tiny, reference, value):
    rungs = {("loss", 0): "loss", ("grad_norm", 0): "grad_norm"}
    for (field, step), rung in (rungs | {("loss", 2): "loss_curve", ("grad_norm", 2): "norm_curve"}).items():
        steps = make_steps(tiny)
        steps[step] = msgspec.structs.replace(steps[step], **{field: value})
        verdict = climb(reference, make_record(tmp_path / rung, tiny, steps=steps))
        assert verdict.failure.rung == (REQUEST if math.isnan(value) else rung)
        assert f"step {step}" in verdict.failure.worst
        assert ("diverged" in verdict.sentence()) == math.isnan(value)
        assert rung in [result.rung for result in verdict.rungs if not result.passed]


def test_in_bfloat16_norms_are_held_while_rounding_has_not_grown_and_the_verdict_says_so(tmp_path, tiny):
    spec = edited(tiny, {"precision": {"dtype": "bfloat16"}, "train": {"max_iters": 25}})
    held = TOLERANCES["bfloat16"]["norm_curve"].steps
    right = make_record(tmp_path / "right", spec)

    def verdict_with(step: int) -> Verdict:
        steps = make_steps(spec)
        steps[step] = msgspec.structs.replace(steps[step], grad_norm=2 * steps[step].grad_norm)
        return climb(right, make_record(tmp_path / str(step), spec, steps=steps))

    assert verdict_with(held - 1).failure.rung == "norm_curve"
    later = verdict_with(held)
    assert later.passed
    (norms,) = [result for result in later.rungs if result.rung == "norm_curve"]
    assert norms.worst.endswith(f"of the first {held} steps, as no later one was compared")


def test_what_was_not_asked_for_is_skipped_and_said(tmp_path, tiny):
    verdict = climb(*(make_record(tmp_path / name, tiny, tensors={}, ladder=False) for name in "ab"))
    assert verdict.passed
    tensors = {"batch", "gradients", "first_weights", "first_moments", "updates", "later_weights"}
    assert set(verdict.skipped) == tensors
    sgd = edited(tiny, {"optimizer": {"name": "sgd"}})  # without momentum
    verdict = climb(*(make_record(tmp_path / name, sgd) for name in ("one", "two")))
    assert verdict.passed
    assert verdict.skipped.keys() == {"first_moments"}


def test_relative_error_is_relative_to_the_largest_entry():
    assert relative_error(np.array([1e-20, 2.0]), np.array([0.0, 2.0])) == pytest.approx(5e-21)
    assert relative_error(np.array([0.5]), np.array([0.0])) == 0.5
    assert math.isinf(relative_error(np.array([np.inf]), np.array([1.0])))
    assert worst_tensor({"a": np.array([1.0])}, {"a": np.array([2.0])}) == (0.5, "a")


def test_one_tensor_of_each_run_is_in_memory_at_a_time():
    """Size is no reason to leave gradients out."""
    alive, most = weakref.WeakSet(), []

    class Tensor(np.ndarray):
        __hash__ = object.__hash__

    class OnDisk(UserDict):
        def __getitem__(self, name):
            alive.add(tensor := np.ones(3).view(Tensor))
            most.append(len(alive))
            return tensor

    on_disk = OnDisk(dict.fromkeys("abcdef"))
    assert worst_tensor(on_disk, on_disk)[0] == 0
    assert max(most) <= 4  # two that are compared, and two of before that are about to go


def test_every_rung_has_a_tolerance_in_every_precision():
    for tolerances in TOLERANCES.values():
        assert set(tolerances) == set(LADDER)
    assert max(tolerance.limit for tolerance in TOLERANCES["float64"].values()) <= 1e-10
    assert TOLERANCES["float32"]["gradients"].limit <= 1e-5
