"""The report: one self-contained page, the verdict first, nothing executable in it, the same bytes twice."""

import re

import msgspec
import pytest
from benches import HERE, RAN, TIMING, cases_of, measurement_of
from outline import Outline
from records import (
    FEW_ROWS,
    finished_of,
    make_record,
    make_run,
    make_steps,
    outcome_of,
    tensors_of,
)

from compare.contract.ceiling import Ceiling
from compare.contract.ledger import Ledger
from compare.contract.request import Rung
from compare.judge.costs import cost_of
from compare.judge.outcome import read_run, save
from compare.present.report.beside import FileLink, ceilings_beside, links_beside, own_links
from compare.present.report.render import EXPERIMENT, write_report
from compare.present.report.tables import NONE, cost_table
from compare.present.tables import cost_rows
from compare.show.findings import Table
from compare.spec.experiment import edited, parse

pytestmark = pytest.mark.usefixtures("with_pictures")
PIPELINE = {"layout": {"pp": 2, "microbatches": 2}, "model": {"n_layer": 2}}


def test_page_is_self_contained_and_reproducible(tmp_path, tiny):
    make_run(tmp_path, tiny)
    page = write_report(tmp_path).read_text()
    assert page.index("PASS") < page.index("<svg")
    assert page.count("<svg") == 9
    assert "currentColor" in page
    assert "prefers-color-scheme: dark" in page
    assert "<script>" not in page  # the name was escaped
    assert not [word for word in ("src=", "<link", "@import", "url(http") if word in page]
    assert write_report(tmp_path).read_text() == page
    assert parse((tmp_path / EXPERIMENT).read_text()) == tiny


def test_page_can_be_read_by_those_who_cannot_see_it(tmp_path, tiny):
    experiment = edited(tiny, PIPELINE | {"layout": {"pp": 2, "microbatches": 2, "schedule": "gpipe"}})
    make_run(tmp_path, experiment, missing=("torch-library",))
    page = write_report(tmp_path).read_text()
    outline = Outline(page)
    assert (outline.tags["main"], outline.tags["h1"]) == (1, 1)
    assert (outline.headers_without_scope, outline.boxes_without_name) == (0, 0)
    assert len(outline.cells) > 100
    assert "" not in outline.cells
    assert len(outline.pictures) == len(set(outline.pictures)) == page.count("<svg") == 10
    assert not [name for name, times in outline.ids.items() if times > 1]


def test_page_of_one_engine_claims_nothing(tmp_path, tiny):
    make_run(tmp_path, tiny, names=("jax-manual",))
    page = write_report(tmp_path).read_text()
    assert '<p class="verdict ">jax-manual ran alone' in page
    assert "Loss difference" not in page
    assert "The ladder" not in page
    assert "" not in Outline(page).cells


def test_studies_beside_a_run_are_led_to_and_lend_their_ceiling(tmp_path, tiny):
    folder, beside = tmp_path / "run", tmp_path / "bench of mine"
    comparison = make_run(folder, tiny)
    _, records = read_run(folder)
    beside.mkdir()
    (beside / "bench.html").touch()
    (folder / "profile.html").touch()
    assert [link.target for link in own_links(folder)] == ["profile.html", "outcome.json"]
    cost = comparison.costs[0]
    assert cost.engine == "torch-manual"
    most = 4 * cost.model_flops_per_s
    ceilings = {"torchpar float64": Ceiling(dtype="float64", flops_per_s=most, threads=2, size=512)}
    here = msgspec.structs.replace(HERE, machine=msgspec.structs.replace(HERE.machine, system="a machine"))
    more = {"timing": TIMING, "baseline": "torch-manual", "anyway": False, "ceilings": ceilings}
    (case,) = cases_of(edited(tiny, {"train": {"max_iters": 7}}), engines=("torch-manual",))
    told = {"study": "bench", "cases": {case.name: case}, "circumstances": here, "more": more}

    def found(experiment=tiny, device="a CPU", **other) -> tuple[list[FileLink], Table]:
        timed = measurement_of(case, 1, how=msgspec.structs.replace(RAN, device_kind=device))
        save(outcome_of(experiment, **told | other, kept={case.name: {1: timed}}), beside)
        table = cost_table(comparison, ceilings_beside(folder, comparison, records))
        return links_beside(folder, comparison), table

    links, table = found()
    assert links == [FileLink("bench of mine", "../bench%20of%20mine/bench.html", "bench")]
    assert table.rows[-1].head.text == "of the ceiling"
    of_torch, of_jax = table.rows[-1].cells
    assert (of_torch.text, of_jax.text) == ("25.0%", NONE)  # JAX's own was not measured
    assert of_torch.note.endswith("GFLOP/s, bench of mine")
    for odd in ({"device": "other"}, {"circumstances": HERE}, {"platform": "gpu"}):
        assert found(**odd)[1].rows[-1].head.text != "of the ceiling"
    assert found(edited(tiny, {"train": {"seed": 5}}))[0] == []


def test_page_of_a_known_device_says_its_utilisation(tmp_path, tiny):
    """989.5e12 operations a second of an H100 in bfloat16; halved, if two share the work."""
    on_two = edited(tiny, {"layout": {"dp_replicate": 2}, "precision": {"dtype": "bfloat16"}})
    record = make_record(tmp_path / "run", on_two)
    manifest = msgspec.structs.replace(record.manifest, device_kind="NVIDIA H100 80GB HBM3", platform="gpu")
    cost = cost_of(msgspec.structs.replace(record, manifest=manifest))
    assert cost.mfu == pytest.approx(cost.model_flops_per_s / 2 / 989.5e12)
    assert cost_of(record).mfu is msgspec.UNSET
    rows = dict(cost_rows(finished_of(on_two, {"a": cost})))
    assert rows["MFU, of the devices' peak"] == [f"{cost.mfu:.1%}"]


def test_page_names_what_is_missing_and_how_to_run_it(tmp_path, tiny):
    make_run(tmp_path, tiny, missing=("torch-library", "jax-compiler"))
    page = write_report(tmp_path).read_text()
    assert "4 engines</h1>" in page
    missing = page[page.index("What is missing") : page.index("<svg")]
    assert "torch-library</strong>: &lt;b&gt;no&lt;/b&gt; luck [/x]" in missing
    assert "jax-compiler</strong>: did not run" in missing
    assert f"shardpair run --continue {tmp_path}" in missing


def test_page_leads_with_the_failure(tmp_path, tiny):
    tensors = tensors_of(tiny)
    tensors[Rung.GRADIENTS]["norm.scale"] = tensors[Rung.GRADIENTS]["norm.scale"] * 4
    make_run(tmp_path, tiny, tensors=tensors)
    page = write_report(tmp_path).read_text()
    assert "FAIL at gradients: norm.scale is off by" in page[: page.index("<svg")]


def test_a_run_that_diverged_has_a_report_and_fails(tmp_path, tiny):
    steps = [msgspec.structs.replace(step, loss=float("nan")) for step in make_steps(tiny)]
    make_run(tmp_path, tiny, steps=steps)
    comparison, _ = read_run(tmp_path)
    assert not comparison.passed
    assert "jax-manual: it diverged: the loss of step 0 is nan" in comparison.sentence()
    page = write_report(tmp_path).read_text()
    assert "it diverged" in page


def test_costs_leave_out_the_first_and_the_instrumented_step(tmp_path, tiny):
    five = edited(tiny, {"train": {"max_iters": 5}, "layout": {"dp_replicate": 2}})
    cost = cost_of(msgspec.structs.replace(make_record(tmp_path / "run", five), ledger=Ledger(rows=FEW_ROWS)))
    assert cost.step_time_ms_median == pytest.approx(13.0)  # of steps 2, 3, 4: 12, 13, 14 ms
    assert cost.peak_mem_bytes == 2000
    assert (cost.comm_calls, cost.comm_bytes, cost.comm_wire_bytes) == (3, 4004, 6006)
    assert cost.tokens_per_s == pytest.approx(4 * 16 / 0.013)


def test_table_and_page_show_the_same_cells(tmp_path, tiny):
    comparison = make_run(tmp_path, tiny)
    page = write_report(tmp_path).read_text()
    for label, cells in cost_rows(comparison):
        assert f'<th scope="row">{label}</th>' in page
        for cell in cells:
            assert re.search(rf"<td>{re.escape(cell)}(</td>| <small>)", page)
