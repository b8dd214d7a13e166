"""Sameness of arrays: what counts as a difference, where it is, and its likely cause."""

import numpy as np
import pytest

from compare.numerics.same import Value, assert_same

RANDOM = np.random.default_rng(0)
REFERENCE = RANDOM.normal(size=(8, 6))
HALVES = {"rank 0": (slice(0, 4), slice(0, 6)), "rank 1": (slice(4, 8), slice(0, 6))}


def value(actual, expected=REFERENCE, *, dtypes=("float64", "float64"), **options):
    return Value(name="up.weight", actual=np.asarray(actual), expected=expected, dtypes=dtypes, **options)


def message(actual, *arguments, **options):
    with pytest.raises(AssertionError) as error:
        assert_same([value(actual, *arguments, **options)], rtol=None, atol=None)
    return str(error.value)


def changed(rows):
    actual = REFERENCE.copy()
    actual[rows, 2] += 1.0
    return actual


CAUSES = {
    "twice": (
        2 * REFERENCE,
        {"axes": {"data": 2}},
        "2 times the reference (axis data has 2 devices): is it reduced",
    ),
    "half": (REFERENCE / 4, {}, "0.25 times the reference, 1/4: is a mean taken twice"),
    "factor": (1.7 * REFERENCE, {}, "1.7 times the reference: is a factor missing?"),
    "zeros": (0 * REFERENCE, {}, "all its numbers are 0"),
    "nan": (np.where(REFERENCE > 1, np.nan, REFERENCE), {}, "of its numbers are NaN"),
    "order": (REFERENCE[[4, 5, 6, 7, 0, 1, 2, 3]], {}, "the reference in another order along dim 0"),
    "mask": (np.where(REFERENCE > 0, REFERENCE, 0), {}, "is it another dropout mask?"),
    "rows": (changed([4, 5]), {}, "only in [4:6] of dim 0, [2:3] of dim 1"),
    "shard": (changed([6]), {"regions": HALVES}, "only in the parts of rank 1"),
    "later": (changed([6]), {"regions": HALVES}, "do they count positions from 0?"),
    "sum": (REFERENCE / 4, {"copies": [REFERENCE / 4, REFERENCE * 3 / 4]}, "their sum is the reference"),
    "mean": (REFERENCE - 1, {"copies": [REFERENCE - 1, REFERENCE + 1]}, "their mean is the reference"),
    "copies": (REFERENCE, {"copies": [REFERENCE, REFERENCE + 5]}, "its 2 copies on ranks or devices differ"),
    "part": (REFERENCE[:2], {}, "shape (8, 6): is it one of 4 shards of dim 0?"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause_is_named(name):
    actual, options, words = CAUSES[name]
    assert words in message(actual, **options)


def test_place_and_size_of_the_largest_difference():
    actual = REFERENCE.copy()
    actual[1, 5] += 1e-3
    actual[3, 2] += 1e-2
    text = message(actual)
    assert "up.weight (float64, shape (8, 6)): 2 of 48 numbers differ, most at [3, 2]: " in text
    assert f"{actual[3, 2]:.6g} instead of {REFERENCE[3, 2]:.6g} (rtol 1e-07, atol 1e-07)" in text


@pytest.mark.parametrize(
    ("dtypes", "error", "is_same"),
    [
        (("float64", "float64"), 5e-8, True),
        (("float64", "float64"), 1e-5, False),
        (("float32", "float64"), 5e-6, True),
        (("bfloat16", "float32"), 1e-2, True),
        (("float32", "float32"), 1e-2, False),
    ],
)
def test_tolerance_of_the_coarser_dtype(dtypes, error, is_same):
    near = value(REFERENCE * (1 + error), REFERENCE, dtypes=dtypes)
    if is_same:
        assert_same([near], rtol=None, atol=None)
    else:
        with pytest.raises(AssertionError):
            assert_same([near], rtol=None, atol=None)
    assert_same([near], rtol=0.1, atol=None)


def test_integers_are_exact():
    large = np.array([2**53, 7])
    assert_same([value(large, large.copy(), dtypes=("int64", "int64"))], rtol=None, atol=None)
    text = message(large + np.array([1, 0]), large, dtypes=("int64", "int64"))
    assert "1 of 2 numbers differ, most at [0]" in text


def test_number_without_dims():
    assert "it is: 2 instead of 1" in message(np.array(2.0), np.array(1.0))


def test_long_message_counts_the_rest():
    values = [value(2 * REFERENCE) for _ in range(12)]
    with pytest.raises(AssertionError, match=r"13 of 13 values differ(?s:.*)\.\.\. and 5 more"):
        assert_same(values, rtol=None, atol=None, problems=["bias: it is only in the reference"])


def test_infinite_numbers_have_no_ratio():
    with pytest.raises(AssertionError, match="4 of 4 numbers differ"):
        assert_same([value(np.full(4, np.inf), np.ones(4))], rtol=None, atol=None)
