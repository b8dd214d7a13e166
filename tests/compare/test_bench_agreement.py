"""A bench's cases are held to each other step by step."""

import itertools

import numpy as np

from compare.commands.bench.agreement import (
    LIMITS,
    agreement_summary,
    disagreements,
)
from compare.judge.tolerances import TOLERANCES
from compare.spec.experiment import edited
from tests.support.benches import STEPS, bench_of, cases_of, measurement_of

NORMS = np.linspace(3.0, 1.0, STEPS)
LOSSES = np.linspace(5.5, 4.5, STEPS)


def bench_in(tiny, dtype, *, loss=0.0, norm=0.0, first=0, warmup=2000):
    """Two cases of which the second is off by these shares from the step `first` on."""
    fields = {"precision": {"dtype": dtype}, "optimizer": {"warmup_iters": warmup, "lr_decay_iters": 9000}}
    cases = cases_of(edited(tiny, fields))
    off = np.arange(STEPS) >= first
    curves = [
        {
            "losses": (LOSSES * (1 + share[0] * off)).tolist(),
            "grad_norms": (NORMS * (1 + share[1] * off)).tolist(),
        }
        for share in ((0, 0), (loss, norm))
    ]
    return bench_of(
        cases, measurements=[measurement_of(c, 1, **of) for c, of in zip(cases, curves, strict=True)]
    )


OTHER_WORK = {
    "float32 asked, bfloat16 computed": ("float32", {"loss": 1.7e-5, "norm": 4.3e-4}),
    "float32 asked, products of float16's ten bits, as TF32's are": ("float32", {"norm": 2.6e-5, "first": 1}),
    "the same batch all window long": ("float32", {"loss": 1e-2, "first": 4}),
    "no norm": ("float32", {"norm": -1.0}),
    "no number": ("float32", {"loss": float("nan"), "first": STEPS - 1}),
    "half of the accumulated passes": ("bfloat16", {"loss": 3e-3, "norm": 1e-2}),
    "no optimizer step in a long warm-up": ("bfloat16", {"loss": 1.7e-3, "first": 20}),
    "unreduced from step 5 on": ("bfloat16", {"loss": 2e-3, "norm": 0.1, "first": 5}),
    "rounded to float32": ("float64", {"loss": 1e-8, "first": STEPS - 1}),
}
"""How far off each is at least, as measured."""


def test_other_work_is_seen(tiny):
    for what, (dtype, off) in OTHER_WORK.items():
        (line,) = disagreements(bench_in(tiny, dtype, **off))
        named = "loss" if "loss" in off else "gradient norm"
        assert line.startswith("torch-library.single did not do the same work as torch-manual.single"), what
        assert f"the {named} of step" in line, what


CORRECT = {
    "float64": {"loss": 1e-13, "norm": 1e-12},
    "float32": {"loss": 5e-7, "norm": 1e-6},
    "bfloat16": {"loss": 2e-5, "norm": 2e-3},
    "float16": {"loss": 1e-6, "norm": 1e-4},
}
"""How far correct engines part from the first step on, as measured in 44 steps."""


def test_rounding_is_no_other_work(tiny):
    assert CORRECT.keys() == TOLERANCES.keys()
    for dtype, apart in CORRECT.items():
        result = bench_in(tiny, dtype, **apart)
        assert disagreements(result) == []
        said = f"at most {apart['loss']:.0e} and {apart['norm']:.0e} apart"
        assert said in agreement_summary(result)


def test_rounding_that_has_had_time_to_grow_is_none_either(tiny):
    """Weights have moved after twelve steps at the full rate."""
    for dtype, (figure, name) in itertools.product(TOLERANCES, (("loss", "loss"), ("norm", "grad_norm"))):
        most = LIMITS[dtype, name][1]
        assert disagreements(bench_in(tiny, dtype, **{figure: 0.5 * most}, first=12, warmup=1)) == []
        (line,) = disagreements(bench_in(tiny, dtype, **{figure: 2 * most}, first=12, warmup=1))
        assert (f"off by {2 * most:.1e} in the median" in line) == (dtype != "float64")


def test_a_spike_of_training_is_no_other_work(tiny):
    """Single steps of correct engines part, in norms by more than one: half of all must agree."""
    for dtype, loss in (("float32", 2e-4), ("bfloat16", 0.03), ("float16", 0.03)):
        assert disagreements(bench_in(tiny, dtype, loss=loss, norm=1.5, first=30, warmup=1)) == []
        assert disagreements(bench_in(tiny, dtype, loss=loss, norm=1.5, first=15, warmup=1))


def test_every_round_is_held_and_a_case_named_once(tiny):
    first, second = cases = cases_of(tiny)
    measurements = [
        measurement_of(case, number, losses=[2.5 + 0.1 * (number == 3)] * STEPS)
        for case in cases
        for number in (1, 2, 3, 4)
    ]
    lines = disagreements(bench_of(cases, measurements=measurements))
    assert [line.partition(" did")[0] for line in lines] == [first.name, second.name]
    assert all("in round 3 the loss of step 0 is 2.6, and not 2.5: off by 4.0e-02" in line for line in lines)


def test_cases_are_held_to_those_of_the_same_training(tiny):
    """A variant that trains otherwise is held to its like; one alone is said to be."""
    variants = ("layout.bucket_mb=1", "optimizer.weight_decay=0.0", "train.loss_chunks=2")
    cases = cases_of(tiny, variants=variants)
    decayed, chunked = (f"torch-library {variant}.single" for variant in variants[1:])
    measurements = []
    for case in cases:
        loss = 2.5 + ("weight_decay" in case.name) + (case.name in (decayed, chunked))
        measurements.append(measurement_of(case, 1, losses=[loss] * STEPS))
    lines = disagreements(bench_of(cases, measurements=measurements))
    assert [line.partition(": ")[0] for line in lines] == [
        f"{decayed} did not do the same work as torch-manual {variants[1]}.single",
        f"{chunked} did not do the same work as torch-manual.single",
    ]
    alone = cases_of(tiny, engines=("torch-manual",))
    said = agreement_summary(bench_of(alone, measurements=[measurement_of(alone[0], 1)]))
    assert said.startswith("Nothing else trained the same as torch-manual.single: ")
