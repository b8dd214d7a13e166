"""The ladder itself: it must pass equal runs, and turn red at the right rung for every difference."""

import math

import msgspec
import numpy as np
import pytest
from records import make_record, make_steps, tensors_of

from compare.contract.record import Rung
from compare.numerics import RUNGS, climb, relative_error, worst_tensor
from compare.tolerances import TOLERANCES

WORST = "blocks.1.mlp.up.weight"


@pytest.fixture
def reference(tmp_path, tiny):
    return make_record(tmp_path / "reference", tiny)


def test_equal_runs_pass_every_rung(tmp_path, tiny, reference):
    verdict = climb(reference, make_record(tmp_path / "same", tiny))
    assert verdict.passed
    assert verdict.sentence() == "PASS"
    assert [result.rung for result in verdict.rungs] == list(RUNGS)
    assert all(result.error == 0 for result in verdict.rungs)


@pytest.mark.parametrize(
    ("rung", "expected"),
    [
        (Rung.INITIAL_WEIGHTS, "initial_weights"),
        (Rung.GRADIENTS, "gradients"),
        (Rung.FIRST_WEIGHTS, "first_weights"),
        (Rung.FIRST_M, "first_moments"),
        (Rung.FIRST_V, "first_moments"),
        (Rung.LATER_WEIGHTS, "later_weights"),
    ],
)
@pytest.mark.parametrize("damage", ["moved", "nan", "missing", "reshaped"])
def test_damage_to_one_tensor_is_named_at_its_rung(tmp_path, tiny, reference, rung, expected, damage):
    tensors = tensors_of(tiny)
    tensor = tensors[rung].pop(WORST).copy()
    if damage == "moved":
        tensor.flat[3] += 1e-3 * np.abs(tensor).max()
    if damage == "nan":
        tensor.flat[3] = np.nan
    if damage == "reshaped":
        tensor = tensor.T
    if damage != "missing":
        tensors[rung][WORST] = tensor
    verdict = climb(reference, make_record(tmp_path / "damaged", tiny, tensors=tensors))
    assert verdict.failure.rung == expected
    assert WORST in verdict.failure.worst
    assert (
        verdict.failure.error == pytest.approx(1e-3)
        if damage == "moved"
        else math.isinf(verdict.failure.error)
    )
    assert expected in verdict.sentence()


def test_a_wrong_token_fails_at_the_batch(tmp_path, tiny, reference):
    tensors = tensors_of(tiny)
    tensors[Rung.BATCH]["targets"] = tensors[Rung.BATCH]["targets"] + (np.arange(8).reshape(1, 2, 4) == 5)
    assert climb(reference, make_record(tmp_path / "other", tiny, tensors=tensors)).failure.rung == "batch"


@pytest.mark.parametrize(
    ("field", "step", "rung"), [("loss", 0, "loss"), ("grad_norm", 0, "grad_norm"), ("loss", 3, "loss_curve")]
)
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_wrong_scalar_fails_at_its_rung(tmp_path, tiny, reference, field, step, rung, value):
    steps = make_steps()
    steps[step] = msgspec.structs.replace(steps[step], **{field: value})
    failure = climb(reference, make_record(tmp_path / "other", tiny, steps=steps)).failure
    assert failure.rung == rung
    assert failure.worst == f"step {step}"


def test_a_run_that_stopped_early_fails(tmp_path, tiny, reference):
    verdict = climb(reference, make_record(tmp_path / "short", tiny, steps=make_steps(4)))
    assert verdict.failure.rung == "loss_curve"
    assert "4 steps instead of 5" in verdict.failure.worst


def test_missing_tensors_are_skipped_only_when_both_runs_lack_them(tmp_path, tiny, reference):
    bare = make_record(tmp_path / "bare", tiny, tensors={})
    assert not climb(reference, bare).passed
    verdict = climb(bare, make_record(tmp_path / "bare2", tiny, tensors={}))
    assert verdict.passed
    assert set(verdict.skipped) == {"batch", "gradients", "first_weights", "first_moments", "later_weights"}


def test_relative_error_is_relative_to_the_largest_entry():
    assert relative_error(np.array([1e-20, 2.0]), np.array([0.0, 2.0])) == pytest.approx(5e-21)
    assert relative_error(np.array([0.5]), np.array([0.0])) == 0.5
    assert math.isinf(relative_error(np.array([np.inf]), np.array([1.0])))
    assert worst_tensor({"a": np.array([1.0])}, {"a": np.array([2.0])}) == (0.5, "a")


def test_every_rung_has_a_tolerance_with_a_reason_in_every_precision():
    for tolerances in TOLERANCES.values():
        assert set(tolerances) == set(RUNGS)
        assert all(tolerance.reason for tolerance in tolerances.values())
    assert max(tolerance.limit for tolerance in TOLERANCES["float64"].values()) <= 1e-10
    assert TOLERANCES["float32"]["gradients"].limit <= 1e-5
