"""The report: one self-contained page, the verdict first, nothing executable in it, the same bytes twice."""

import msgspec
import pytest
from records import make_record, make_steps, tensors_of

from compare.cli import main
from compare.comparison import Comparison, judged, read_comparison, save
from compare.contract.experiment import edited
from compare.contract.record import Rung
from compare.costs import cost_of
from compare.outcome import cost_rows
from compare.report.figures import windowed
from compare.report.render import write_report


def make_comparison(folder, experiment, *, steps=None, tensors=None) -> Comparison:
    """Two engines' records and their comparison, saved in a folder."""
    records = {
        "torch-manual": make_record(folder / "torch-manual", experiment, engine="torch-manual"),
        "jax-manual": make_record(
            folder / "jax-manual", experiment, engine="jax-manual", steps=steps, tensors=tensors
        ),
    }
    planned = Comparison(
        command="run",
        name="<script>alert(1)</script>",
        experiment=experiment,
        platform="cpu",
        created_utc="2026-01-01T00:00:00+00:00",
        machine="a machine",
        git_commit="0123456789abcdef",
        git_dirty=False,
        requests={name: record.request for name, record in records.items()},
    )
    comparison = judged(planned, records)
    save(comparison, folder)
    return comparison


def test_page_is_self_contained_and_reproducible(tmp_path, tiny):
    make_comparison(tmp_path, tiny)
    page = write_report(tmp_path).read_text()
    assert page.index("PASS") < page.index("<svg")
    assert page.count("<svg") == 5
    assert "currentColor" in page
    assert "prefers-color-scheme: dark" in page
    assert "<script>" not in page  # the name was escaped
    assert not [word for word in ("src=", "<link", "@import", "url(http") if word in page]
    assert write_report(tmp_path).read_text() == page


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
    assert "it diverged" in write_report(tmp_path).read_text()


def test_costs_leave_out_the_first_and_the_instrumented_step(tmp_path, tiny):
    five = edited(tiny, {"train": {"max_iters": 5}, "layout": {"dp_replicate": 2}})
    cost = cost_of(make_record(tmp_path / "run", five))
    assert cost.step_time_ms_median == pytest.approx(13.0)  # of steps 2, 3, 4: 12, 13, 14 ms
    assert cost.peak_mem_bytes == 2000
    assert (cost.comm_calls, cost.comm_bytes, cost.comm_wire_bytes) == (3, 4004, 6006)
    assert cost.tokens_per_s == pytest.approx(4 * 16 / 0.013)


def test_table_and_page_show_the_same_cells(tmp_path, tiny):
    comparison = make_comparison(tmp_path, tiny)
    page = write_report(tmp_path).read_text()
    for label, cells in cost_rows(comparison):
        for cell in [label, *cells]:
            assert f"<td>{cell}</td>" in page


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
