"""The report of a run: what every page promises, the verdict first, and the record's numbers."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from matplotlib.figure import Figure as Canvas

import compare.show
from compare.cli import main
from compare.commands.run import Run
from compare.commands.run.messages import boxes_of, message_figure
from compare.commands.run.page import cost_table, difference_figure, finding, ladder_table, loss_figure
from compare.contract.communication import GRADIENTS, NORM, Communication
from compare.contract.ledger import Ledger
from compare.contract.memory_profile import MEMORY, Curve, DeviceMemory, MemoryProfile, Peak
from compare.contract.request import Rung
from compare.judge.alone import OWN_GRADIENTS, UPDATE
from compare.judge.outcome import read_outcome, save
from compare.judge.verdict import RungResult, Verdict
from compare.run.metrics import figures
from compare.run.study import write_page_of
from compare.show.figures import WINDOWS, Box, Figure, gantt, reduce_windows, save_figures, svg
from compare.show.findings import findings_of
from compare.spec.experiment import edited, load
from compare.system.json_files import write_json
from tests.support.outline import require_alone
from tests.support.records import FEW_ROWS, make_record, make_run, make_steps, outcome_of, tensors_of

pytestmark = pytest.mark.usefixtures("with_pictures")


def write_report(folder):
    return write_page_of(Run, read_outcome(folder), folder)


PIPELINE = {"layout": {"pp": 2, "microbatches": 2, "schedule": "gpipe"}, "model": {"n_layer": 2}}


def test_page_is_self_contained_and_complete(tmp_path, tiny):
    outcome = make_run(tmp_path, edited(tiny, PIPELINE), missing=("torch-library", "jax-compiler"))
    kinds = {"parameters": [3000, 3000, 5000], "gradients": [0, 2000, 2000]}
    peak = Peak(bytes={"parameters": 5000, "gradients": 2000}, position=2, phase="forward")
    curve = Curve(positions=[0, 1, 2], bytes=kinds, marks=[(0, "forward")], length=3)
    profile = MemoryProfile(devices=[DeviceMemory(peak=peak, curve=curve)], method="by hand")
    write_json(tmp_path / outcome.finished[0] / MEMORY, profile)
    page = write_report(tmp_path).read_text()
    outline = require_alone(page)
    assert set(outline.pictures) == {
        "Loss over steps",
        "Difference of the loss",
        "Messages of a step",
        f"Memory of {outcome.finished[0]} over a step",
        "GPipe, 2 ranks, 2 microbatches",
    }
    top = page[: page.index("<svg")]
    assert "Pipeline of 2 stages, GPipe with 2 microbatches: 2 CPU devices." in top
    assert "torch-library</strong>: did not finish: &lt;b&gt;no&lt;/b&gt; luck [/x]" in top
    assert "jax-compiler</strong>: did not run" in top
    assert f"shardpair run --continue {tmp_path}" in top
    assert "ranks idle 33% of the time" in page
    assert re.search(r"7 kB <small>estimated: [\d.]+ kB", page)
    for row in cost_table(outcome).rows:
        assert f'<th scope="row">{row.head.text}</th>' in page
        assert all(re.search(rf"<td>{re.escape(cell.text)}(</td>| <small>)", page) for cell in row.cells)
    picture = tmp_path / "overlay.png"
    assert main(["report", str(tmp_path), "--picture", str(picture)]) == 1  # it lacks two engines
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.html").read_text() == page  # the same bytes twice


def test_page_starts_with_the_failure(tmp_path, tiny):
    make_run(tmp_path / "alone", tiny, names=("jax-manual",))
    page = write_report(tmp_path / "alone").read_text()
    require_alone(page)
    assert "jax-manual ran alone" in page
    assert "Difference of the loss" not in page
    assert "The ladder" not in page
    tensors = tensors_of(tiny)
    tensors[Rung.GRADIENTS]["norm.scale"] = tensors[Rung.GRADIENTS]["norm.scale"] * 4
    make_run(tmp_path / "wrong", tiny, tensors=tensors)
    page = write_report(tmp_path / "wrong").read_text()
    assert "FAIL at gradients: norm.scale is off by" in page[: page.index("<svg")]
    steps = [msgspec.structs.replace(step, loss=float("nan")) for step in make_steps(tiny)]
    outcome = make_run(tmp_path / "lost", tiny, steps=steps)
    assert not outcome.passed
    assert "it diverged: the loss of step 0 is nan" in outcome.sentence()
    assert "it diverged" in write_report(tmp_path / "lost").read_text()


SIX = ("jax-compiler", "jax-explicit", "jax-manual", "torch-manual", "torch-library", "torch-compiler")
SAME = "compute the same (loss, gradients, weights, optimizer: 14 checks)"


def test_verdict_is_one_sentence(tmp_path, tiny, capsys):
    """It counts engines, names what was compared, and names engines that send more than the textbook."""
    outcome = make_run(tmp_path, edited(tiny, {"layout": {"dp_replicate": 2}}), names=SIX)
    assert finding(outcome) == f"PASS: all 6 engines {SAME}. Each sends the bytes of the textbook, within 1%"
    assert finding(msgspec.structs.replace(outcome, left_out={"a": "b"})).startswith("PASS: 6 engines")
    verdicts = [
        msgspec.structs.replace(verdict, uncompared={"bytes sent": f"{verdict.candidate} has none"})
        for verdict in outcome.verdicts[:2]
    ]
    unlike = msgspec.structs.replace(outcome, verdicts=verdicts).sentence()
    assert "; not compared: bytes sent (jax-explicit has none, jax-manual has none)" in unlike
    for name, multiple in {"jax-compiler": 1.051, "torch-library": 0.97, "jax-manual": 1.002}.items():
        outcome.kept[name][1]["comm_of_textbook"] = multiple
    save(outcome, tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["passed"] is True
    assert shown["verdict"] == (
        f"PASS: all 6 engines {SAME}. jax-compiler sends 5% more, "
        "torch-library sends 3% less than the textbook (docs/compilers.md)"
    )
    assert shown["verdict"] in (tmp_path / "report.html").read_text()


def draw(figure: Figure) -> Any:
    axes = Canvas().subplots()
    figure.draw(axes)
    return axes


def test_equal_curves_are_drawn_once(tmp_path, tiny):
    """One loss curve within 1e-3, one difference for equal losses, and no point for an equal loss."""
    one, same, near, far = (make_record(tmp_path / str(number), tiny) for number in range(4))
    near.steps[1:] = [msgspec.structs.replace(step, loss=step.loss * 1.0001) for step in near.steps[1:]]
    far.steps[0] = msgspec.structs.replace(far.steps[0], loss=1.0)
    figure = loss_figure({"a": one, "b": same, "c": near})
    assert len(draw(figure).lines) == 1
    assert "All 3 engines within 1e-04" in figure.caption
    assert len(draw(loss_figure({"a": one, "b": far})).lines) == 2
    equal, apart = draw(difference_figure({"a": one, "b": same, "c": near, "d": near})).lines
    assert (equal.get_label(), list(equal.get_xdata())) == ("b (no difference)", [])
    assert (apart.get_label(), apart.get_xdata()[0]) == ("c, d", 1)


def test_legend_has_one_order():
    for kinds in (("backward", "forward"), ("forward", "backward")):
        boxes = [Box(row, 0.0, 1.0, kind) for row, kind in enumerate(kinds)]
        figure = Figure(title="two", draw=lambda axes, boxes=boxes: gantt(axes, ["a", "b"], boxes, "ms"))
        assert re.findall("forward|backward", svg(figure)) == ["forward", "backward"]


def test_messages_are_boxes_by_phase():
    def row(phase: str, axis: str, size: int, **more: Any) -> Communication:
        about = {"kind": "all_reduce", "purpose": GRADIENTS, "calls": 1, "wire_bytes": size} | more
        return Communication(phase=phase, axis=axis, bytes=size, **about)

    rows = [row("backward", "tp", 600), row("forward", "tp", 400), row("backward", "tp", 100, calls=2)]
    rows += [row("backward", "dp_replicate", 8), row("update", "tp", 900, purpose=NORM)]  # a scalar; the norm
    key = ("all_reduce", "tp", GRADIENTS)
    assert boxes_of(rows) == {("backward", *key): (700, 3), ("forward", *key): (400, 1)}
    record = SimpleNamespace(ledger=Ledger(rows=rows))
    figure = message_figure({"jax-manual": record})
    assert {text.get_text() for text in draw(figure).texts} == {
        "all_reduce over tp\n700 B\n3 calls",
        "all_reduce over tp\n400 B\n1 call",
    }
    assert [text.get_text() for text in draw(figure).get_xticklabels()] == ["forward", "backward"]
    assert message_figure({"jax-manual": SimpleNamespace(ledger=Ledger())}) is None


def test_page_links_to_what_explains_it(tmp_path, tiny):
    make_run(tmp_path / "run", edited(tiny, {"layout": {"dp_replicate": 2}}))
    (tmp_path / "run" / "lesson.html").write_text("a page")
    page = write_report(tmp_path / "run").read_text()
    links = re.findall('<a href="([^"]+)">', page)
    assert [Path(link).name for link in links] == ["lesson.html", "compilers.md", "proof.md"]
    assert all((tmp_path / "run" / link).is_file() for link in links)
    for command in ("lesson data_parallel", "ledger"):
        assert f'<pre class="command">shardpair {command} --results {tmp_path / "run"}' in page
    assert "lesson tensor_parallel" not in page


def test_page_escapes_names(tmp_path, tiny, recwarn):
    """Neither what turns text around, nor what a terminal obeys, nor a warning that a font lacks a glyph."""
    make_run(tmp_path / "run", tiny, name="a\u202eb\x1b[2J")
    page = write_report(tmp_path / "run").read_text()
    assert r"a\u202eb\x1b[2J" in page
    assert not {"\u202e", "\x1b"} & set(page)
    odd = Figure(title="odd", draw=lambda axes: axes.set(xlabel="\x1b[2J 日本"))
    save_figures(tmp_path / "odd.png", [odd])
    assert [str(warning.message) for warning in recwarn] == []


def test_notes_of_tables_are_short(tmp_path, tiny):
    """The ladder names the worst tensor alone; MFU is explained if a row has it."""
    worst = f"v of norm.scale after step 0{OWN_GRADIENTS}"
    result = RungResult(rung=UPDATE, error=1e-8, tolerance=1e-6, worst=worst)
    table = ladder_table([Verdict(candidate="a", reference="b", rungs=[result])])
    (row,) = (row for row in table.rows if row.head.text == UPDATE)
    assert row.cells[0].note == "v of norm.scale after step 0"
    outcome = make_run(tmp_path / "run", tiny)
    assert "MFU" not in cost_table(outcome).below
    outcome.kept["jax-manual"][1]["mfu"] = 0.5
    assert "MFU is their share of the vendor's peak." in cost_table(outcome).below


def test_costs_skip_first_and_instrumented_steps(tmp_path, tiny):
    five = edited(tiny, {"train": {"max_iters": 5}, "layout": {"dp_replicate": 2}})
    cost = figures(msgspec.structs.replace(make_record(tmp_path / "run", five), ledger=Ledger(rows=FEW_ROWS)))
    assert "step_time_ms_p95" not in cost
    assert cost["step_time_ms_median"] == pytest.approx(13.0)  # of steps 2, 3, 4: 12, 13, 14 ms
    assert cost["peak_mem_bytes"] == 2000
    assert (cost["comm_calls"], cost["comm_bytes"], cost["comm_wire_bytes"]) == (3, 4004, 6006)
    assert cost["tokens_per_s"] == pytest.approx(4 * 16 / 0.013)


def test_undrawable_figure_keeps_verdict(tmp_path, tiny, monkeypatch, capsys):
    make_run(tmp_path, tiny)
    assert main(["report", str(tmp_path)]) == 0

    def fail(figure: Figure) -> str:
        raise RuntimeError("no font")

    monkeypatch.setattr("compare.show.page.svg", fail)
    assert main(["report", str(tmp_path)]) == 0
    why = "Loss over steps cannot be drawn: RuntimeError: no font"
    assert why in capsys.readouterr().err
    assert why in (tmp_path / "report.html").read_text()


def test_long_curves_are_reduced():
    values = [float(value) for value in range(2 * WINDOWS + 1)]
    starts, worst = reduce_windows(values, max)
    assert starts[:3] == [0, 3, 6]
    assert worst[:2] == [2.0, 5.0]
    assert worst[-1] == 2 * WINDOWS  # the rest of a window still counts
    assert reduce_windows(values[:WINDOWS], max) == (list(range(WINDOWS)), values[:WINDOWS])


def test_footer_without_versions_is_whole_sentences():
    assert " . " not in findings_of(outcome_of(load("check")), sentence="nothing").source


def test_names_in_tables_are_not_broken():
    style = (Path(compare.show.__file__).parent / "style.css").read_text()
    (rule,) = re.findall(r"^tbody th \{(.*?)\}", style, re.MULTILINE)
    assert "white-space: nowrap" in rule
    assert "overflow-wrap: anywhere" not in rule
