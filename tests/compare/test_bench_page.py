"""The page and the words of a bench: one file, the same bytes twice, honest about what is missing."""

import msgspec
import pytest
from benches import bench_of, cases_of, finished, measurement_of
from outline import require_alone

from compare.judge.statistics import Estimate
from compare.judge.timed_outcome import blocks
from compare.present.bench_words import in_one_line, sentences, warnings
from compare.show.findings import written
from compare.show.page import write_page
from compare.studies.bench import Bench


@pytest.fixture
def result(tiny):
    cases = cases_of(tiny, presets=("ddp", "fsdp"), devices=(2,), variants=("layout.bucket_mb=1",))
    return finished(cases)


def page_of(result, folder, **given) -> str:
    return write_page(
        folder / "bench.html", Bench.findings(msgspec.structs.replace(result, **given), folder)
    ).read_text()


def test_page_stands_alone_and_has_every_row_with_its_interval(tmp_path, result):
    page = page_of(result, tmp_path, name="<script>alert(1)</script>", left_out={"x": "<b>no</b>"})
    assert "<b>no" not in page
    cells = require_alone(page).cells
    for rows in blocks(result).values():
        for row in rows:
            assert row.label in cells
            assert written(row.wall_ratio, ".2f") in cells
    assert sum("[" in cell for cell in cells) == 2 * 6  # wall and CPU of all but the two baselines


def test_ratios_say_no_more_than_they_know():
    assert written(None, ".2f") == "-"
    assert written(Estimate(median=0.734, rounds=3), ".2f") == "0.73"
    assert written(Estimate(median=0.734, rounds=5, low=0.7, high=0.8), ".2f") == "0.73 [0.70, 0.80]"


def test_a_round_without_the_baseline_has_no_ratio(tiny):
    first, second = cases = cases_of(tiny)
    measurements = [measurement_of(first, number) for number in (1, 2)]
    measurements += [measurement_of(second, number, wall_ms=20.0) for number in (1, 3)]
    (rows,) = blocks(bench_of(cases, measurements=measurements, rounds=3)).values()
    assert rows[0].wall_ratio is None
    assert (rows[1].wall_ratio.median, rows[1].wall_ratio.rounds) == (2.0, 1)


def test_figures_are_medians_over_rounds(tiny):
    (case,) = cases = cases_of(tiny, engines=("torch-manual",))
    walls = {1: 10.0, 2: 30.0, 3: 12.0}
    measurements = [measurement_of(case, number, wall_ms=wall) for number, wall in walls.items()]
    ((row,),) = blocks(bench_of(cases, measurements=measurements, rounds=3)).values()
    assert (row.wall_ms, row.cpu_ms, row.single_ms) == pytest.approx((12.0, 24.0, 13.2))
    assert row.tokens_per_s == pytest.approx(case.experiment.tokens_per_step / 0.012)


def test_words_say_what_must_be_known(result, tiny):
    said = " ".join(sentences(result))
    assert "CPU timings: 5 rounds" in said
    assert "Around it: 93.8 % intervals of 5 rounds." in said
    assert in_one_line(result).startswith("Wall time over that of torch-manual, 5 rounds: torch-library")
    few = msgspec.structs.replace(result, rounds=4)
    assert "Fewer than 5 rounds: no interval" in " ".join(sentences(few))
    others = {case.name: case for case in cases_of(tiny, engines=("jax-manual",))}
    without = msgspec.structs.replace(result, cases=result.cases | others)
    assert "(which is not in single)" in " ".join(sentences(without))
    assert warnings(result) == []
