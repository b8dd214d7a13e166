"""Pictures of a report: what is drawn, what a pointer reads off, their bytes, the words beside them."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from outline import Outline
from records import (
    make_record,
    make_run,
    make_steps,
)

from compare.cli import main
from compare.contract.memory_profile import (
    CLASSES,
    MEMORY,
    Curve,
    DeviceMemory,
    MemoryProfile,
    Peak,
    PhaseStart,
)
from compare.host.json_files import write_json
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.outcome import read_run
from compare.present.report import canvas
from compare.present.report.curves import windowed
from compare.present.report.figures import gradient_norms, loss_curves, loss_differences
from compare.present.report.memory import at_rest
from compare.present.report.memory_curves import corners
from compare.present.report.pictures import how_close
from compare.present.report.render import write_report
from compare.present.report.slim_svg import slim
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import edited, load
from compare.terminal import human_bytes

pytestmark = pytest.mark.usefixtures("with_pictures")
MOST_BYTES = 300_000
SIX = tuple(STUDIED)
PIPELINE = {"layout": {"pp": 2, "microbatches": 2}, "model": {"n_layer": 2}}


def test_page_says_the_layout_in_words_and_draws_the_schedule(tmp_path, tiny):
    make_run(tmp_path, edited(tiny, PIPELINE))
    page = write_report(tmp_path).read_text()
    top = page[: page.index("<svg")]
    assert "Pipeline of 2 stages, 1F1B with 2 microbatches: 2 CPU devices." in top
    assert "Timeline of 1F1B, 2 ranks, 2 microbatches" in Outline(page).pictures
    assert "ranks wait 33% of the time" in page


def long_comparison(folder, experiment):
    """Every engine over 120 noisy steps, three with a curve of memory: as much to draw as a demo has."""
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
    comparison = make_run(folder, long, names=SIX, steps=steps)
    in_use = {kind: (random.random(100) * 1e6).astype(int).repeat(3).tolist() for kind in CLASSES[:6]}
    peak = Peak(bytes={kind: max(values) for kind, values in in_use.items()}, position=9, phase="forward")
    curve = Curve(positions=list(range(300)), bytes=in_use, marks=[PhaseStart(0, "forward")], length=300)
    profile = MemoryProfile(devices=[DeviceMemory(peak=peak, curve=curve)], method="by hand")
    for name in SIX[-3:]:
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
    _, records = read_run(folder)
    names = list(SIX)
    slimmed = gradient_norms(names, records)
    monkeypatch.setattr(canvas, "slim", lambda svg: svg)
    grown = len(gradient_norms(names, records)) / len(slimmed)
    assert grown * len(page.encode()) > MOST_BYTES  # as matplotlib writes it


def test_values_under_a_pointer_are_those_of_the_records(long_page):
    folder, page = long_page
    _, records = read_run(folder)
    (loss,) = re.findall(r'<svg[^>]*aria-label="Loss over steps".*?</svg>', page, re.DOTALL)
    shown = dict(re.findall(r"<title>step (\d+)(.*?)</title>", loss, re.DOTALL))
    assert len(shown) == 60  # every other one of 120
    for step, text in shown.items():
        losses = {f"{record.steps[int(step)].loss:.4f}" for record in records}
        assert losses == set(re.findall(r"\d+\.\d{4}", text)), step
    assert shown["0"] == ": 5.5000 in all 6"
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
    assert '<g><title>3 MB</title><path d="M10.1 20H30.5V40H10.1z" style="fill: none"/></g><text' in slimmed
    assert slimmed.endswith("<text>1.23456</text>")  # words stay
    assert slim('<path d="M 1 2 L 3 4 L 5 2 z"/>') == '<path d="M1 2L3 4L5 2z"/>'  # no box
    mark = '<use xlink:href="#m" x="1.256" y="2" style="fill: red"/>'
    together = '<g style="fill: red"><use href="#m" x="1.26" y="2"/><use href="#m" x="1.26" y="2"/></g>'
    assert slim(f'<g id="a">{mark}\n<g clip-path="url(#p)">{mark}{mark}</g></g>') == (
        f'<use href="#m" x="1.26" y="2" style="fill: red"/><g clip-path="url(#p)">{together}</g>'
    )
    values = [5, 5, 5, 7, 7, 7, 7, 6]
    assert corners(values) == [0, 2, 3, 6, 7]


def test_page_says_what_the_model_computes_and_leads_to_what_lies_beside(long_page, tmp_path):
    folder, page = long_page
    comparison, _ = read_run(folder)
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


def test_long_curves_are_reduced_over_windows_and_short_ones_shown_whole():
    values = [float(value) for value in range(301)]
    starts, worst = windowed(values, max)
    assert starts[:3] == [0, 3, 6]
    assert worst[:2] == [2.0, 5.0]
    assert worst[-1] == 300.0  # the rest of a window still counts
    assert windowed(values[:150], max) == (list(range(150)), values[:150])


def test_picture_for_a_page_of_ones_own(tmp_path, tiny):
    make_run(tmp_path, tiny)
    assert main(["report", str(tmp_path), "--picture", str(tmp_path / "overlay.png")]) == 0
    assert (tmp_path / "overlay.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(tmp_path), "--picture", str(tmp_path / "overlay.exe")]) == 2
