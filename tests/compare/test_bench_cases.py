"""The cases of a bench: what is timed, in which order, against what, what is left out; their figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.commands.bench.outcome import rows_by_block
from compare.run.rounds import rotate
from compare.setup.presets import edits_of
from compare.spec.experiment import ExperimentError
from tests.support.benches import bench_of, cases_of, grid_of, measurement_of


def names(cases) -> list[str]:
    return [case.name for case in cases]


def test_cases_are_engines_by_layout_and_size(tiny):
    cases = cases_of(
        tiny, presets=("single", "ddp"), devices=(2, 4), sizes=("train.batch_size=4", "model.n_layer=4")
    )
    assert len(cases) == 2 * 3 * 2  # single is one layout, however many devices there are
    assert names(cases)[:2] == [
        "torch-manual.single, train.batch_size=4",
        "torch-library.single, train.batch_size=4",
    ]
    sized = next(case for case in cases if case.block == "ddp-4, model.n_layer=4")
    assert (sized.experiment.model.n_layer, sized.experiment.layout.dp_replicate) == (4, 4)
    assert {case.experiment.train.max_iters for case in cases} == {cases[0].experiment.train.max_iters}
    assert len(set(names(cases))) == len(cases)


def test_variants_are_rows_after_plain_engine(tiny):
    cases = cases_of(tiny, presets=("ddp",), devices=(2,), variants=("layout.bucket_mb=1,layout.remat=full",))
    assert [case.label for case in cases] == [
        "torch-manual",
        "torch-library",
        "torch-manual layout.bucket_mb=1,layout.remat=full",
        "torch-library layout.bucket_mb=1,layout.remat=full",
    ]
    assert (cases[2].experiment.layout.bucket_mb, cases[2].experiment.layout.remat) == (1.0, "full")
    assert cases[0].experiment.layout.remat == "auto"
    assert len({case.block for case in cases}) == 1


def test_variants_leave_out_engines_that_they_do_not_change(tiny):
    """A JAX engine has no rows for options of torch-compiler; a variant that changes no case stays."""
    how = {"engines": ("torch-compiler", "jax-manual", "torch-manual"), "presets": ("single",)}
    variants = ("layout.compile=inductor", "layout.xla=tuned", "layout.compile=inductor,layout.remat=dots")
    cases, left_out = grid_of(tiny, **how, devices=(1,), variants=variants)
    assert not {f"{name} {variants[0]}.single" for name in how["engines"][1:]} & cases.keys()
    assert f"torch-compiler {variants[0]}.single" in cases
    assert all(f"{name} {variants[1]}.single" in cases for name in how["engines"])
    assert f"jax-manual {variants[2]}.single" in cases
    assert left_out[f"jax-manual {variants[0]}.single"].startswith("layout.compile has an effect only for ")


def test_engine_named_twice_is_its_own_baseline(tiny):
    first, second = cases = cases_of(tiny, engines=("torch-manual", "torch-manual"))
    assert names(cases) == ["torch-manual.single", "torch-manual (2).single"]
    assert first.experiment == second.experiment
    result = bench_of(cases, baseline="torch-manual")
    assert result.baseline_of(second) == first


@given(st.integers(1, 4), st.integers(1, 3))
def test_order_rotates_within_each_block(engines, layouts):
    from compare.spec.engines.registry import ENGINES
    from compare.spec.experiment import Experiment

    presets = ("single", "ddp", "fsdp")[:layouts]
    cases = cases_of(Experiment(), engines=tuple(ENGINES)[:engines], presets=presets, devices=(2,))
    size, result = len(cases) // layouts, bench_of(cases)
    for start in range(0, len(cases), size):
        block = [rotate(result, number)[start : start + size] for number in range(1, size + 1)]
        assert block[0] == names(cases[start : start + size])
        assert all(sorted(order) == sorted(block[0]) for order in block)
        assert len({order[0] for order in block}) == size  # each is the first once
    assert rotate(result, size + 1) == rotate(result, 1)


def test_impossible_cases_have_reasons(tiny):
    cases, left_out = grid_of(
        tiny,
        engines=("jax-compiler", "torch-manual"),
        presets=("ddp", "hsdp", "pp"),
        devices=(2, 8),
        variants=("layout.gradient_sync=overlapped",),
    )
    assert list(cases) == [
        "jax-compiler.ddp-2",
        "torch-manual.ddp-2",
        "torch-manual layout.gradient_sync=overlapped.ddp-2",
        "torch-manual.pp-2",
    ]
    assert "has an effect only" in left_out["torch-manual layout.gradient_sync=overlapped.pp-2"]
    assert "has no effect" in left_out["jax-compiler layout.gradient_sync=overlapped.ddp-2"]
    assert "hsdp takes a multiple of 2 from 4 on" in left_out["hsdp-2"]
    assert "batch_size = 4 is not divisible" in left_out["ddp-8"]
    assert "possible: gpipe, interleaved" in left_out["jax-compiler.pp-2"]
    assert not set(left_out) & set(cases)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"presets": ("ddp", "ddp")}, "--presets ddp: give each preset once"),
        ({"presets": ("ddp",), "sizes": ("layout.tp=2",)}, "layout.tp contradicts --presets ddp"),
        ({"sizes": ("batch_size=8",)}, "batch_size=8: give fields and values such as"),
        ({"sizes": ("train.batch_size=8", "train.batch_size=8")}, "give each setting once"),
        ({"variants": ("train.max_iters=8",)}, "--window sets the steps of a bench"),
        ({"variants": ("layout.remat=auto",)}, "it is the same training as the default"),
        ({"presets": ("ddp",), "devices": (0, 2)}, "--devices 0: give numbers from 1 on, each once"),
        ({"presets": ("ddp",), "devices": (2, 2)}, "--devices 2: give numbers from 1 on, each once"),
    ],
    ids=["twice", "layout", "section", "size_twice", "steps", "default", "no_device", "devices_twice"],
)
def test_impossible_choice_is_rejected(tiny, choice, message):
    with pytest.raises(ExperimentError) as refused:
        cases_of(tiny, **choice)
    assert message in str(refused.value)


def test_values_are_read_as_toml_writes_them():
    assert edits_of("train.batch_size=8, layout.remat=full,model.bias=true,layout.bucket_mb=0.5") == {
        "train": {"batch_size": 8},
        "layout": {"remat": "full", "bucket_mb": 0.5},
        "model": {"bias": True},
    }
    assert edits_of('layout.remat="full"') == edits_of("layout.remat=full")
    assert edits_of("layout.remat=1\nx = 2") == {"layout": {"remat": "1\nx = 2"}}  # which no field takes


def test_baseline_is_per_block_or_global(tiny):
    cases = cases_of(
        tiny, presets=("single", "ddp"), devices=(2,), sizes=("train.batch_size=4", "train.batch_size=8")
    )
    result = bench_of(cases, baseline="torch-library")
    assert all(result.baseline_of(case).block == case.block for case in cases)
    assert {result.baseline_of(case).engine for case in cases} == {"torch-library"}
    result = bench_of(cases, baseline="torch-manual.single")
    for case in cases:
        found = result.baseline_of(case)
        wanted = {"layout": "single", "size": case.coordinates["size"]}
        assert (found.engine, found.coordinates) == ("torch-manual", wanted)
    assert bench_of(cases, baseline="jax-manual").baseline_of(cases[0]) is None


def test_ratio_needs_the_baseline_of_its_round(tiny):
    first, second = cases = cases_of(tiny)
    measurements = [measurement_of(first, number) for number in (1, 2)]
    measurements += [measurement_of(second, number, wall_ms=20.0) for number in (1, 3)]
    (rows,) = rows_by_block(bench_of(cases, measurements=measurements, rounds=3)).values()
    assert rows[0].wall_ratio is None
    assert (rows[1].wall_ratio.median, rows[1].wall_ratio.rounds) == (2.0, 1)


def test_figures_are_medians_over_rounds(tiny):
    (case,) = cases = cases_of(tiny, engines=("torch-manual",))
    walls = {1: 10.0, 2: 30.0, 3: 12.0}
    measurements = [measurement_of(case, number, wall_ms=wall) for number, wall in walls.items()]
    ((row,),) = rows_by_block(bench_of(cases, measurements=measurements, rounds=3)).values()
    assert (row.wall_ms, row.cpu_ms, row.single_ms) == pytest.approx((12.0, 24.0, 13.2))
    assert row.tokens_per_s == pytest.approx(case.experiment.tokens_per_step / 0.012)
