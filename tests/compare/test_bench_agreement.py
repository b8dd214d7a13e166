"""The losses and norms of a bench's cases are compared with the ladder's tolerances."""

import numpy as np
import pytest

from compare.commands.bench.agreement import find_disagreements, summarize_agreement
from compare.judge.rungs import NAMED, limit_of_few_tokens
from compare.spec.experiment import edited
from tests.support.benches import STEPS, bench_of, cases_of, measurement_of

NORMS = np.linspace(3.0, 1.0, STEPS)
LOSSES = np.linspace(5.5, 4.5, STEPS)


def bench_in(tiny, dtype, *, loss=0.0, norm=0.0, first=0):
    """Two cases of which the second is off by these shares from the step `first` on."""
    cases = cases_of(edited(tiny, {"precision": {"dtype": dtype}}))
    later = np.arange(STEPS) >= first
    off_loss, off_norm = (np.where(later, 1 + share, 1.0) for share in (loss, norm))
    measurements = [
        measurement_of(cases[0], 1, losses=LOSSES.tolist(), grad_norms=NORMS.tolist()),
        measurement_of(
            cases[1], 1, losses=(LOSSES * off_loss).tolist(), grad_norms=(NORMS * off_norm).tolist()
        ),
    ]
    return bench_of(cases, measurements=measurements)


@pytest.mark.parametrize(
    ("dtype", "off"),
    [
        ("float32", {"loss": 1.7e-5, "norm": 4.3e-4}),  # bfloat16 was computed
        ("float32", {"loss": 1e-2, "first": 4}),  # the same batch in a whole window
        ("float32", {"norm": -1.0}),
        ("float32", {"loss": float("nan"), "first": STEPS - 1}),
        ("bfloat16", {"loss": 3e-3, "norm": 1e-2}),  # half of the accumulated passes
        ("float64", {"loss": 1e-8, "first": STEPS - 1}),  # rounded to float32
    ],
)
def test_bench_finds_other_work(tiny, dtype, off):
    """The differences are the smallest ones that were measured for each mistake."""
    (line,) = find_disagreements(bench_in(tiny, dtype, **off))
    named = "loss" if "loss" in off else "gradient norm"
    assert line.startswith("torch-library.single did not do the same work as torch-manual.single")
    assert f"the {named} of step {off.get('first', 0)} is" in line


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_bench_allows_rounding(tiny, dtype):
    limits = {name: getattr(rung.limits, dtype) for name, rung in NAMED.items()}
    first = {"loss": 0.9 * limits["loss"], "norm": 0.9 * limits["grad_norm"]}
    result = bench_in(tiny, dtype, **first)
    assert find_disagreements(result) == []
    assert f"at most {first['loss']:.0e} and {first['norm']:.0e} apart" in summarize_agreement(result)
    curve = limit_of_few_tokens(limits["norm_curve"], tiny, dtype)
    steps = NAMED["norm_curve"].first_steps.get(dtype)
    assert find_disagreements(bench_in(tiny, dtype, norm=0.9 * curve, first=1)) == []
    assert find_disagreements(bench_in(tiny, dtype, norm=1.1 * curve, first=1))
    assert not steps or find_disagreements(bench_in(tiny, dtype, norm=9.0, first=steps)) == []


def test_bench_compares_every_round(tiny):
    first, second = cases = cases_of(tiny)
    measurements = [
        measurement_of(case, number, losses=[2.5 + 0.1 * (number == 3)] * STEPS)
        for case in cases
        for number in (1, 2, 3, 4)
    ]
    lines = find_disagreements(bench_of(cases, measurements=measurements))
    assert [line.partition(" did")[0] for line in lines] == [first.name, second.name]
    assert all("in round 3 the loss of step 0 is 2.6, and not 2.5: off by 4.0e-02" in line for line in lines)


def test_bench_compares_same_training(tiny):
    """A variant that trains otherwise is compared with its like; a case without one is named."""
    variants = ("layout.bucket_mb=1", "optimizer.weight_decay=0.0", "train.loss_chunks=2")
    cases = cases_of(tiny, variants=variants)
    decayed, chunked = (f"torch-library {variant}.single" for variant in variants[1:])
    measurements = []
    for case in cases:
        loss = 2.5 + ("weight_decay" in case.name) + (case.name in (decayed, chunked))
        measurements.append(measurement_of(case, 1, losses=[loss] * STEPS))
    lines = find_disagreements(bench_of(cases, measurements=measurements))
    assert [line.partition(": ")[0] for line in lines] == [
        f"{decayed} did not do the same work as torch-manual {variants[1]}.single",
        f"{chunked} did not do the same work as torch-manual.single",
    ]
    alone = cases_of(tiny, engines=("torch-manual",))
    summary = summarize_agreement(bench_of(alone, measurements=[measurement_of(alone[0], 1)]))
    assert summary.startswith("The numbers of torch-manual.single are unchecked")
