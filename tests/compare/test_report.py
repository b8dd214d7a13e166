"""The report: one self-contained page, the verdict first, nothing executable in it, the same bytes twice."""

import re

import msgspec
import pytest
from outline import Outline
from records import (
    FEW_ROWS,
    make_comparison,
    make_record,
    make_steps,
    tensors_of,
)

from compare.cli import main
from compare.contract.ledger import Ledger
from compare.contract.request import Rung
from compare.judge.comparison import read_comparison, read_saved, save
from compare.judge.costs import cost_of
from compare.present.report.figures import loss_curves, loss_differences, windowed
from compare.present.report.pictures import how_close
from compare.present.report.render import write_report
from compare.present.report.repeat import EXPERIMENT
from compare.present.tables import cost_rows
from compare.spec.experiment import edited, parse

PIPELINE = {"layout": {"pp": 2, "microbatches": 2}, "model": {"n_layer": 2}}


@pytest.mark.usefixtures("with_pictures")
def test_page_is_self_contained_and_reproducible(tmp_path, tiny):
    make_comparison(tmp_path, tiny)
    page = write_report(tmp_path).read_text()
    assert page.index("PASS") < page.index("<svg")
    assert page.count("<svg") == 8
    assert "currentColor" in page
    assert "prefers-color-scheme: dark" in page
    assert "<script>" not in page  # the name was escaped
    assert not [word for word in ("src=", "<link", "@import", "url(http") if word in page]
    assert write_report(tmp_path).read_text() == page
    assert parse((tmp_path / EXPERIMENT).read_text()) == tiny


def test_page_can_be_read_by_those_who_cannot_see_it(tmp_path, tiny):
    experiment = edited(tiny, PIPELINE | {"layout": {"pp": 2, "microbatches": 2, "schedule": "gpipe"}})
    make_comparison(tmp_path, experiment, missing=("torch-library",))
    page = write_report(tmp_path).read_text()
    outline = Outline(page)
    assert (outline.tags["main"], outline.tags["h1"]) == (1, 1)
    assert (outline.headers_without_scope, outline.boxes_without_name) == (0, 0)
    assert len(outline.cells) > 100
    assert "" not in outline.cells
    assert len(outline.pictures) == len(set(outline.pictures)) == page.count("<title>") - 1 == 9
    assert not [name for name, times in outline.ids.items() if times > 1]


@pytest.mark.usefixtures("with_pictures")
def test_page_says_the_layout_in_words_and_draws_the_schedule(tmp_path, tiny):
    make_comparison(tmp_path, edited(tiny, PIPELINE))
    page = write_report(tmp_path).read_text()
    top = page[: page.index("<svg")]
    assert "Pipeline of 2 stages, 1F1B with 2 microbatches: 2 CPU devices." in top
    assert "Timeline of 1F1B, 2 ranks, 2 microbatches" in Outline(page).pictures
    assert "ranks wait 33% of the time" in page


def test_page_of_one_engine_claims_nothing(tmp_path, tiny):
    make_comparison(tmp_path, tiny, names=("jax-manual",))
    page = write_report(tmp_path).read_text()
    assert '<p class="verdict ">jax-manual ran alone' in page
    assert "Loss difference" not in page
    assert "The ladder" not in page
    assert "" not in Outline(page).cells


def test_page_names_what_is_missing_and_how_to_run_it(tmp_path, tiny):
    make_comparison(tmp_path, tiny, missing=("torch-library", "jax-compiler"))
    page = write_report(tmp_path).read_text()
    assert "4 engines</h1>" in page
    missing = page[page.index("What is missing") : page.index("<svg")]
    assert "torch-library</strong>: &lt;b&gt;no&lt;/b&gt; luck [/x]" in missing
    assert "jax-compiler</strong>: did not run" in missing
    assert f"shardpair run --continue {tmp_path}" in missing


def test_page_says_that_the_records_no_longer_give_the_saved_verdict(tmp_path, tiny):
    make_comparison(tmp_path, tiny)
    saved = read_saved(tmp_path)
    rungs = [msgspec.structs.replace(result, error=9e-13) for result in saved.verdicts[0].rungs]
    save(
        msgspec.structs.replace(saved, verdicts=[msgspec.structs.replace(saved.verdicts[0], rungs=rungs)]),
        tmp_path,
    )
    page = write_report(tmp_path).read_text()
    assert "the records no longer give the saved verdict" in page[: page.index("<svg")]


@pytest.mark.usefixtures("with_pictures")
def test_page_says_in_words_whether_curves_can_be_told_apart(tmp_path, tiny):
    record = make_record(tmp_path / "run", tiny)

    def with_losses(factors):
        steps = [
            msgspec.structs.replace(step, loss=step.loss * factor)
            for step, factor in zip(record.steps, factors, strict=True)
        ]
        return ["a", "b"], [record, msgspec.structs.replace(record, steps=steps)]

    assert how_close(*with_losses([1, 1, 1])) == "All 2 curves are equal, bit for bit."
    assert how_close(*with_losses([1, 1 + 1e-9, 1])) == (
        "All 2 curves lie on each other: the furthest off is b at step 1, by 1.0e-09 of the loss."
    )
    assert how_close(*with_losses([1, 1, 2])) == "The curves part: b is off by 1.0e+00 of the loss at step 2."
    ending = with_losses([1, float("nan"), 1])
    assert how_close(*ending) == "b cannot be compared from step 1 on: a loss is not finite."
    assert "b (not finite from step 1)" in loss_curves(*ending)  # in the legend
    nothing = with_losses([float("nan")] * 3)
    assert "b (not finite from step 0)" in loss_differences(*nothing)
    equal = loss_differences(*with_losses([1, 1, 1]))
    assert "equal, bit for bit" in equal  # zero has no place on a log axis, and is drawn nonetheless


def test_page_leads_with_the_failure(tmp_path, tiny):
    tensors = tensors_of(tiny)
    tensors[Rung.GRADIENTS]["norm.scale"] = tensors[Rung.GRADIENTS]["norm.scale"] * 4
    make_comparison(tmp_path, tiny, tensors=tensors)
    page = write_report(tmp_path).read_text()
    assert "FAIL at gradients: norm.scale is off by" in page[: page.index("<svg")]


def test_a_run_that_diverged_has_a_report_and_fails(tmp_path, tiny):
    steps = [msgspec.structs.replace(step, loss=float("nan")) for step in make_steps(tiny)]
    make_comparison(tmp_path, tiny, steps=steps)
    comparison, _ = read_comparison(tmp_path)
    assert not comparison.passed
    assert "jax-manual: it diverged: the loss of step 0 is nan" in comparison.sentence()
    page = write_report(tmp_path).read_text()
    assert "it diverged" in page
    assert "no longer give" not in page  # an infinite error is saved as none, and is still the same


def test_costs_leave_out_the_first_and_the_instrumented_step(tmp_path, tiny):
    five = edited(tiny, {"train": {"max_iters": 5}, "layout": {"dp_replicate": 2}})
    cost = cost_of(msgspec.structs.replace(make_record(tmp_path / "run", five), ledger=Ledger(rows=FEW_ROWS)))
    assert cost.step_time_ms_median == pytest.approx(13.0)  # of steps 2, 3, 4: 12, 13, 14 ms
    assert cost.peak_mem_bytes == 2000
    assert (cost.comm_calls, cost.comm_bytes, cost.comm_wire_bytes) == (3, 4004, 6006)
    assert cost.tokens_per_s == pytest.approx(4 * 16 / 0.013)


def test_table_and_page_show_the_same_cells(tmp_path, tiny):
    comparison = make_comparison(tmp_path, tiny)
    page = write_report(tmp_path).read_text()
    for label, cells in cost_rows(comparison):
        assert f'<th scope="row">{label}</th>' in page
        for cell in cells:
            assert re.search(rf"<td>{re.escape(cell)}(</td>| <small>)", page)


def test_long_curves_are_reduced_over_windows_and_short_ones_shown_whole():
    values = [float(value) for value in range(301)]
    starts, worst = windowed(values, max)
    assert starts[:3] == [0, 3, 6]
    assert worst[:2] == [2.0, 5.0]
    assert worst[-1] == 300.0  # the rest of a window still counts
    assert windowed(values[:150], max) == (list(range(150)), values[:150])


def test_picture_for_a_page_of_ones_own(tmp_path, tiny):
    make_comparison(tmp_path, tiny)
    assert main(["report", str(tmp_path), "--picture", str(tmp_path / "overlay.png")]) == 0
    assert (tmp_path / "overlay.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(tmp_path), "--picture", str(tmp_path / "overlay.exe")]) == 2


def test_a_check_is_shown_with_a_row_for_each_case(tmp_path, tiny, capsys):
    saved = msgspec.structs.replace(make_comparison(tmp_path, tiny), command="check")
    save(saved, tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Relative errors against one unsharded device" in printed
    assert "Costs" not in printed
    assert str(tmp_path / "report.html") in printed.replace("\n", "")
