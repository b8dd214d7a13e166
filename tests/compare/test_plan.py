"""`shardpair plan`: tables, page, JSON, the sum of one layout, and what is refused."""

import json
from pathlib import Path

import pytest

from compare.cli import main
from compare.plan.predict import CALIBRATED
from compare.spec.experiment import edited, to_toml

ARGUMENTS = ("plan", "small.toml", "--machine", "h100x16", "--quiet")


@pytest.fixture
def small(tiny, tmp_path, monkeypatch):
    """An experiment in bfloat16 in the current folder."""
    monkeypatch.chdir(tmp_path)
    wide = edited(tiny, {"precision": {"dtype": "bfloat16"}, "train": {"batch_size": 32}})
    (tmp_path / "small.toml").write_text(to_toml(wide))


def said(text: str) -> str:
    return " ".join(text.split())


def test_a_plan_is_shown_kept_and_shown_again(small, capsys):
    assert main([*ARGUMENTS, "--explain", "2", "--run_dir", "p"]) == 0
    printed = capsys.readouterr().out
    assert ", term by term" in printed
    assert "layouts that fit, one of each kind; ms of a step" in printed
    assert "Predicted, not measured. 16 devices of 80 GB" in printed
    page = Path("p/plan.html").read_text()
    assert main(["report", "p"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["report", "p", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["rows"][0]
    assert best["seconds"] == pytest.approx(sum(best["parts"].values()))
    assert len(found["rows"]) == 10
    assert (
        len({(row["layout"]["tp"], row["layout"]["pp"], row["layout"]["remat"]) for row in found["rows"]}) > 3
    )
    low, high = found["times_as_long"]
    milliseconds = 1e3 * best["seconds"]
    span = f"{low:g} to {high:g} times as long, {low * milliseconds:,.1f} to {high * milliseconds:,.1f} ms"
    assert span in said(printed)
    assert span in page
    assert found["result"]["more"]["plan"]["machine"]["devices"] == 16


def test_one_measured_step_calibrates(small, capsys):
    assert main([*ARGUMENTS, "--json", "--run_dir", "p"]) == 0
    plain = json.loads(capsys.readouterr().out)["rows"][0]
    milliseconds = 3e3 * plain["seconds"]
    given = (
        "--measured",
        f"{plain['name']}={milliseconds:.6f}ms",
        "--layout.remat",
        plain["layout"]["remat"],
    )
    assert main([*ARGUMENTS, *given, "--json", "--run_dir", "q"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row["seconds"] for row in found["rows"]}
    assert found["times_as_long"] == list(CALIBRATED)
    assert min(rows.values()) <= 1.0001 * milliseconds / 1e3
    assert rows.get(plain["name"], milliseconds / 1e3) == pytest.approx(milliseconds / 1e3, rel=1e-4)
    assert found["result"]["more"]["plan"]["machine"]["slowdown"] > 2.9
    assert main(["report", "q"]) == 0
    assert "one measured step makes compute take" in said(capsys.readouterr().out)
    for wrong in ("fsdp3=4ms", f"{plain['name']}=soon"):
        assert main([*ARGUMENTS, "--measured", wrong]) == 2
        assert "give a layout as the plan names it" in said(capsys.readouterr().err)


def test_sequences_that_devices_do_not_divide_are_named(small, capsys):
    """24 sequences on 16 devices: not another step, and not without a word."""
    given = ("--train.batch_size", "24", "--json", "--run_dir", "p")
    assert main([*ARGUMENTS, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["batch_size"] * row["gradient_accumulation_steps"] for row in found["rows"]} == {24}
    assert main(["report", "p"]) == 0
    assert "data parallelism over 16: 24 sequences do not divide: 32 do" in said(capsys.readouterr().out)


def test_nothing_that_fits_is_an_answer_that_says_what_the_smallest_needs(small, capsys):
    Path("tight.toml").write_text('like = "h100"\ndevices = 8\nmemory_bytes = 20e3')
    assert main(["plan", "small.toml", "--machine", "tight.toml", "--run_dir", "p"]) == 1
    assert "layouts fits: the smallest, " in said(capsys.readouterr().out)


def test_what_cannot_be_planned_is_refused_in_a_line(small, capsys):
    for arguments, says in (
        (("--layout.tp", "3"), "layout.tp = 3: the given degrees must divide its 16 devices"),
        (("--layout.tp", "8"), "layout.tp = 8 does not divide model.n_head = 2"),
        (("--explain", "9999"), "--explain 9999: give a place from 1 to"),
    ):
        assert main([*ARGUMENTS, *arguments, "--run_dir", "p"]) == 2
        streams = capsys.readouterr()
        assert says in said(streams.err)
        assert "Traceback" not in streams.err
        assert streams.out == ""
