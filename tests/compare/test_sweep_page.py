"""The page of a sweep: pictures and tables that stand alone, and the command that asks for it again."""

import msgspec
import pytest
from outline import Outline
from sweeps import plan_of, swept

from compare.cli import parse
from compare.present.sweep import headline, own_experiment, repeat_command, sweep_table, worth
from compare.show.page import write_page
from compare.spec.experiment import load, to_toml
from compare.studies.sweep import Sweep


def page_of(outcome, folder) -> str:
    return write_page(folder / "sweep.html", Sweep.findings(outcome, folder)).read_text()


@pytest.mark.usefixtures("with_pictures")
@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ({"engines": ["torch-manual", "jax-manual"]}, ["Loss of jax-manual", "Loss of torch-manual"]),
        (
            {"engines": ["jax-manual"], "strategies": ["ddp", "ddp_flat"]},
            ["Loss of jax-manual"],
        ),
        ({"devices": [1, 2, 4], "scaling": "weak"}, []),
    ],
)
def test_the_page_stands_alone_and_can_be_read_by_all(small, tmp_path, given, drawn):
    outcome, *_ = swept(plan_of(small, **given), tmp_path)
    page = page_of(outcome, tmp_path)
    outline = Outline(page)
    others = ["Efficiency against one device", "Throughput over devices"]
    if drawn:
        others = ["Peak memory of each strategy", "Step time of each strategy"]
    assert sorted(outline.pictures) == [*(f"{name} over steps" for name in drawn), *others]
    assert (outline.headers_without_scope, outline.boxes_without_name) == (0, 0)
    assert "" not in outline.cells
    assert not [name for name, times in outline.ids.items() if times > 1]
    assert not [word for word in ("<script", "src=", "<link", "@import", "url(http") if word in page]
    assert worth(outcome) in page
    assert "torch-manual, torch-manual" not in page
    assert "PASS" in page
    again, *_ = swept(plan_of(small, **given), tmp_path / "again")
    assert page_of(again, tmp_path / "again") == page


def test_the_page_says_what_its_times_are_worth(small, tmp_path):
    plain, *_ = swept(plan_of(small), tmp_path / "plain")
    assert "an order of magnitude" in worth(plain)
    assert f"share the {plain.circumstances.machine.cores} cores of one machine" in worth(plain)
    scaled, *_ = swept(plan_of(small, devices=[1, 2], scaling="strong"), tmp_path / "scaled")
    assert "what splitting the work costs, and not what more machines would bring" in worth(scaled)
    on_gpus = msgspec.structs.replace(scaled, platform="gpu")
    assert "cores" not in worth(on_gpus)
    assert headline(plain) == "Strategies on 2 CPU devices"


def test_mfu_is_a_column_where_a_chip_has_a_peak(small, tmp_path):
    outcome, *_ = swept(plan_of(small), tmp_path)
    assert "MFU" not in sweep_table(outcome).columns
    known = [msgspec.structs.replace(row, mfu=0.4) for row in outcome.rows]
    table = sweep_table(msgspec.structs.replace(outcome, rows=known))
    assert table.rows[0].cells[table.columns.index("MFU")].text == "40.0%"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"engines": ["jax-manual", "torch-manual"], "devices": [1, 2, 4], "scaling": "weak", "ladder": True},
        {"platform": "gpu", "strategies": ["fsdp_tp"], "devices": [4]},
    ],
)
def test_the_command_on_the_page_asks_for_the_same(small, tmp_path, monkeypatch, given):
    plan = plan_of(small, **given)
    monkeypatch.chdir(tmp_path)
    outcome, *_ = swept(plan, tmp_path / "run")
    spec = Sweep.findings(outcome, tmp_path / "run").spec
    (tmp_path / "experiment.toml").write_text(spec)
    words = repeat_command(plan).split()
    parsed, name = parse(words[1:])
    assert isinstance(parsed, Sweep)
    again = parsed.planned(load(name))
    unlike = {field: getattr(plan, field) for field in ("name", "said", "circumstances", "left_out")}
    assert msgspec.structs.replace(again, **unlike) == plan
    assert again.batches() == plan.batches()


def test_the_command_on_the_page_says_what_was_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "sweep cpu --presets pp ddp --devices 2 --layout.microbatches 4 --layout.gradient_sync flat"
    plan = parse(line.split())[0].planned(load("cpu"))
    (tmp_path / "experiment.toml").write_text(to_toml(own_experiment(plan)))
    words = repeat_command(plan).split()
    parsed, name = parse(words[1:])
    assert parsed.planned(load(name)).batches() == plan.batches()


def test_files_are_found_from_the_folder_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parsed, name = parse(["sweep", "demo", "--data.source", "mine.txt", "--init_from", "w.safetensors"])
    plan = parsed.planned(load(name))
    assert plan.experiment.data.source == str(tmp_path / "mine.txt")
    assert f"--init_from {tmp_path}/w.safetensors" in repeat_command(plan)
