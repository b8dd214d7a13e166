"""The report: one self-contained page, the verdict first, nothing executable in it, the same bytes twice."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from benches import HERE, bench_of, cases_of
from outline import Outline
from records import (
    FEW_ROWS,
    comparison_of,
    make_comparison,
    make_record,
    make_steps,
    tensors_of,
)

from compare.cli import main
from compare.contract.ceiling import Ceiling
from compare.contract.ledger import Ledger
from compare.contract.memory_profile import (
    CLASSES,
    MEMORY,
    Curve,
    DeviceMemory,
    MemoryProfile,
    Peak,
    PhaseStart,
)
from compare.contract.request import Rung
from compare.host.json_files import write_json
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.comparison import read_comparison, read_saved
from compare.judge.costs import cost_of
from compare.judge.outcome import save
from compare.judge.timed_outcome import TimedOutcome
from compare.present.report import canvas
from compare.present.report.beside import FileLink, ceilings_beside, links_beside, own_links
from compare.present.report.curves import windowed
from compare.present.report.figures import gradient_norms, loss_curves, loss_differences
from compare.present.report.memory import at_rest
from compare.present.report.memory_curves import corners
from compare.present.report.pictures import how_close
from compare.present.report.render import write_report
from compare.present.report.repeat import EXPERIMENT
from compare.present.report.slim_svg import slim
from compare.present.report.tables import NONE, cost_table
from compare.present.tables import cost_rows
from compare.show.findings import Table
from compare.spec.experiment import edited, load, parse
from compare.terminal.units import human_bytes

pytestmark = pytest.mark.usefixtures("with_pictures")
MOST_BYTES = 300_000
FOUR = ("jax-compiler", "jax-manual", "torch-manual", "torch-library")
PIPELINE = {"layout": {"pp": 2, "microbatches": 2}, "model": {"n_layer": 2}}


def test_page_is_self_contained_and_reproducible(tmp_path, tiny):
    make_comparison(tmp_path, tiny)
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
    make_comparison(tmp_path, experiment, missing=("torch-library",))
    page = write_report(tmp_path).read_text()
    outline = Outline(page)
    assert (outline.tags["main"], outline.tags["h1"]) == (1, 1)
    assert (outline.headers_without_scope, outline.boxes_without_name) == (0, 0)
    assert len(outline.cells) > 100
    assert "" not in outline.cells
    assert len(outline.pictures) == len(set(outline.pictures)) == page.count("<svg") == 10
    assert not [name for name, times in outline.ids.items() if times > 1]


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


def long_comparison(folder, experiment):
    """Four engines over 120 noisy steps, each with a curve of memory: as much to draw as a demo has."""
    long = edited(experiment, {"train": {"max_iters": 120}})
    random = np.random.default_rng(0)
    steps = [
        msgspec.structs.replace(
            step,
            loss=step.loss * (1 + 1e-7 * random.normal()),
            step_time_ms=10 + 5 * random.random(),
            grad_norm=1 + random.random() if step.step > 20 else step.grad_norm,
        )
        for step in make_steps(long)
    ]
    comparison = make_comparison(folder, long, names=FOUR, steps=steps)
    in_use = {kind: (random.random(300) * 1e6).astype(int).tolist() for kind in CLASSES[:6]}
    peak = Peak(bytes={kind: max(values) for kind, values in in_use.items()}, position=9, phase="forward")
    curve = Curve(positions=list(range(300)), bytes=in_use, marks=[PhaseStart(0, "forward")], length=300)
    profile = MemoryProfile(devices=[DeviceMemory(peak=peak, curve=curve)], method="by hand")
    for name in FOUR[-2:]:
        write_json(folder / name / MEMORY, profile)
    return comparison


@pytest.fixture(scope="module")
def long_page(tmp_path_factory) -> tuple[Path, str]:
    """The folder of `long_comparison` and its page."""
    folder = tmp_path_factory.mktemp("long")
    long_comparison(folder, load("check"))
    return folder, write_report(folder).read_text()


def test_page_of_a_demo_is_small(long_page, monkeypatch):
    folder, page = long_page
    assert len(page.encode()) < MOST_BYTES
    _, records = read_comparison(folder)
    names = list(FOUR)
    slimmed = gradient_norms(names, records)
    monkeypatch.setattr(canvas, "slim", lambda svg: svg)
    grown = len(gradient_norms(names, records)) / len(slimmed)
    assert grown * len(page.encode()) > MOST_BYTES  # as matplotlib writes it


def test_values_under_a_pointer_are_those_of_the_records(long_page):
    folder, page = long_page
    _, records = read_comparison(folder)
    (loss,) = re.findall(r'<svg[^>]*aria-label="Loss over steps".*?</svg>', page, re.DOTALL)
    shown = dict(re.findall(r"<title>step (\d+)(.*?)</title>", loss, re.DOTALL))
    assert len(shown) == 60  # every other one of 120
    for step, text in shown.items():
        losses = {f"{record.steps[int(step)].loss:.4f}" for record in records}
        assert losses == set(re.findall(r"\d+\.\d{4}", text)), step
    assert shown["0"] == ": 5.5000 in all 4"
    (memory,) = re.findall(r'aria-label="Memory of torch-library over a step.*?</svg>', page, re.DOTALL)
    profile = records[-1].memory
    assert profile
    curve = profile.devices[0].curve
    total = sum(values[10] for values in curve.bytes.values())
    assert f"<title>{human_bytes(total)} at operation 10\n" in memory
    held = at_rest(records[0])
    assert held
    assert f"<title>{human_bytes(held.fullest['gradients'])} gradients, closed form" in page


def test_strips_stand_where_their_steps_are_drawn(long_page):
    """The first strip over the first point of the first curve, the last one over the last but one's."""
    (loss,) = re.findall(r'<svg[^>]*aria-label="Loss over steps".*?</svg>', long_page[1], re.DOTALL)
    curve = max(re.findall(r' d="(M[^"]*)"', loss), key=len)
    points = [float(x) for x in re.findall(r"[ML]([-.\d]+) ", curve)]
    strips = [float(x) for x in re.findall(r'd="M([.\d]+) [.\d]+v', loss)]
    width = (points[-1] - points[0]) / 119
    assert strips[0] == pytest.approx(points[0], abs=0.2)
    assert strips[-1] == pytest.approx(points[-1] - width, abs=0.2)


def test_slim_svg_is_the_same_drawing():
    made = (
        '<g id="value:3 MB"><path d="M 10.123456 20 \nL 30.5 20 \nL 30.5 40.000001 \nL 10.123456 40.000001 '
        '\nz\n" style="fill: none"/></g> <text transform="rotate(-0 1 2)">1.23456</text>'
    )
    slimmed = slim(made)
    assert '<g><title>3 MB</title><path d="M10.12 20H30.5V40H10.12z" style="fill: none"/></g><text' in slimmed
    assert slimmed.endswith("<text>1.23456</text>")  # words stay
    assert slim('<path d="M 1 2 L 3 4 L 5 2 z"/>') == '<path d="M1 2L3 4L5 2z"/>'  # no box
    values = [5, 5, 5, 7, 7, 7, 7, 6]
    assert corners(values) == [0, 2, 3, 6, 7]


def test_page_says_what_the_model_computes_and_leads_to_what_lies_beside(long_page, tmp_path):
    folder, page = long_page
    comparison, _ = read_comparison(folder)
    experiment = comparison.experiment
    tokens = 120 * experiment.tokens_per_step
    assert f'<th scope="row">tokens seen</th><td>{tokens:,}</td>' in page
    cost = comparison.costs[0]
    flops = model_flops_per_token(experiment) * cost.tokens_per_s
    assert cost.model_flops_per_s == pytest.approx(flops)
    assert "MFU" not in page  # no vendor says what "a CPU" computes
    assert "a shardpair bench beside this run measures a ceiling" in page
    for name in ("outcome.json", "torch-manual/ledger.json", "torch-manual/memory.json"):
        assert f'<a href="{name}">' in page
        assert (folder / name).is_file()
    assert "profile.html" not in page
    assert "The same experiment beside it" not in page


def test_studies_beside_a_run_are_led_to_and_lend_their_ceiling(tmp_path, tiny):
    folder, beside = tmp_path / "run", tmp_path / "bench of mine"
    comparison = make_comparison(folder, tiny)
    _, records = read_comparison(folder)
    beside.mkdir()
    (beside / "bench.html").touch()
    (folder / "profile.html").touch()
    assert [link.target for link in own_links(folder)] == ["profile.html", "outcome.json"]
    cost = comparison.costs[0]
    assert cost.engine == "torch-manual"
    most = 4 * cost.model_flops_per_s
    ceilings = {"torchpar float64": Ceiling(dtype="float64", flops_per_s=most, threads=2, size=512)}
    here = msgspec.structs.replace(HERE, machine=msgspec.structs.replace(HERE.machine, system="a machine"))
    outcome = bench_of(
        cases_of(edited(tiny, {"train": {"max_iters": 7}})), ceilings=ceilings, circumstances=here
    )

    def found(outcome: TimedOutcome) -> tuple[list[FileLink], Table]:
        save(outcome, beside)
        table = cost_table(comparison, ceilings_beside(folder, comparison, records))
        return links_beside(folder, comparison), table

    links, table = found(outcome)
    assert links == [FileLink("bench of mine", "../bench%20of%20mine/bench.html", "bench")]
    assert table.rows[-1].head.text == "of the ceiling"
    of_torch, of_jax = table.rows[-1].cells
    assert (of_torch.text, of_jax.text) == ("25.0%", NONE)  # JAX's own was not measured
    assert of_torch.note.endswith("GFLOP/s, bench of mine")

    other = {name: msgspec.structs.replace(how, device_kind="other") for name, how in outcome.how.items()}
    for odd in (
        msgspec.structs.replace(outcome, how=other),
        msgspec.structs.replace(outcome, circumstances=HERE),
        msgspec.structs.replace(outcome, platform="gpu"),
    ):
        assert found(odd)[1].rows[-1].head.text != "of the ceiling"
    assert found(msgspec.structs.replace(outcome, experiment=edited(tiny, {"train": {"seed": 5}})))[0] == []


def test_page_of_a_known_device_says_its_utilisation(tmp_path, tiny):
    """989.5e12 operations a second of an H100 in bfloat16; halved, if two share the work."""
    on_two = edited(tiny, {"layout": {"dp_replicate": 2}, "precision": {"dtype": "bfloat16"}})
    record = make_record(tmp_path / "run", on_two)
    manifest = msgspec.structs.replace(record.manifest, device_kind="NVIDIA H100 80GB HBM3", platform="gpu")
    cost = cost_of(msgspec.structs.replace(record, manifest=manifest))
    assert cost.mfu == pytest.approx(cost.model_flops_per_s / 2 / 989.5e12)
    assert cost_of(record).mfu is msgspec.UNSET
    rows = dict(cost_rows(comparison_of(on_two, cases=["a"], costs=[cost])))
    assert rows["MFU, of the devices' peak"] == [f"{cost.mfu:.1%}"]


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
    saved = msgspec.structs.replace(make_comparison(tmp_path, tiny), study="check")
    save(saved, tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Relative errors against one unsharded device" in printed
    assert "Costs" not in printed
    assert str(tmp_path / "report.html") in printed.replace("\n", "")
