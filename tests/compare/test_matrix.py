"""Every layout of each engine in float64, with dropout, against one device; and the grid itself."""

import json
import shutil

import grid as grids
import msgspec
import pytest
from bounds import assert_bounded
from grid import DEVICES, SOME
from records import CLIMBED, comparison_of, make_record, make_request

from compare.cli import main
from compare.judge.closed_forms.memory import KINDS, TOLERANCE, closed_form, excess
from compare.judge.comparison import judged
from compare.judge.ladder import RungResult, Verdict, climb
from compare.judge.outcome import save
from compare.present.parity_page import cell_text, markdown
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import ExperimentError, Layout, load, parse, to_toml
from compare.studies.matrix_cells import LAYOUTS, STUDIES, Cell, matrix_cases, study
from compare.studies.presets import PRESETS, Said, preset_layout, settings_in

TRAINED = ("fsdp_tp", "pp_interleaved")
"""Layouts of the command's one real run, by torch-library; `make matrix` has every cell."""


@pytest.mark.parametrize("preset", [*DEVICES, *SOME])
def test_layouts_equal_one_device(grid, preset):
    for engine, record in grid.records(preset).items():
        verdict = climb(grid.reference, record)
        assert [rung.rung for rung in verdict.rungs] == grids.CLIMBED
        assert max(rung.error for rung in verdict.rungs) <= 1e-10, (engine, verdict.sentence())
        held = record.manifest.resident_bytes
        assert abs(excess(held, closed_form(engine, record.manifest.experiment))) <= TOLERANCE, engine
        if not (
            engine == "torch-manual" and "tp_sp" in preset
        ):  # whose loss holds a fourth copy of its logits
            assert_bounded(record)


def test_the_command_holds_layouts_to_one_device(shardpair):
    arguments = ("--engines", "torch-library", "--layouts", *TRAINED, "--studies", "float64, dropout")
    done = shardpair("matrix", *arguments, "--train.max_iters", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads(done.stdout)
    assert [cell["layout"] for cell in cells] == list(TRAINED)
    for cell in cells:
        (verdict,) = cell["verdicts"].values()
        errors = {result["rung"]: result["error"] for result in verdict["rungs"]}
        assert len(errors) == len(CLIMBED)
        assert max(errors.values()) <= 1e-10, cell
        assert cell["resident"].keys() == cell["closed_form"].keys() == set(KINDS)
        assert abs(excess(cell["resident"], cell["closed_form"])) <= TOLERANCE, cell


def test_presets_fill_the_devices():
    for name, preset in PRESETS.items():
        layout = preset_layout(Layout(), name, preset.devices)
        assert layout.devices == (1 if name == "single" else preset.devices)


def test_a_composition_takes_any_schedule():
    chosen = Layout(schedule="interleaved", chunks=2)
    said = Said(file=settings_in(chosen))
    assert preset_layout(chosen, "fsdp_pp", 4, said).schedule == "interleaved"
    assert preset_layout(chosen, "fsdp_pp", 4, said).chunks == 2
    assert preset_layout(chosen, "pp_gpipe", 4, said).schedule == "gpipe"
    assert preset_layout(chosen, "single", 1, said) == Layout()


@pytest.mark.parametrize(("name", "devices"), [("hsdp", 3), ("hsdp", 2), ("hsdp_tp", 4), ("nosuch", 4)])
def test_presets_refuse_what_they_cannot_fill(name, devices):
    with pytest.raises(ExperimentError, match=name if name == "nosuch" else f"--devices {devices}"):
        preset_layout(Layout(), name, devices)


def test_every_cell_is_a_case_or_has_a_reason():
    cases, cells = matrix_cases(study(load("check"), "float64"), list(STUDIED), LAYOUTS)
    names = {case.name for case in cases}
    for engine in STUDIED:
        for layout in LAYOUTS:
            assert (f"{engine}.{layout}" in names) != bool(cells[layout, engine].refusal)


def test_results_that_lack_a_study_or_are_of_another_do_not_pass(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny))
    shown = [
        "matrix",
        "tiny.toml",
        "--layouts",
        "ddp",
        "--engines",
        "torch-manual",
        "--results",
        "kept",
        "--json",
        "--studies",
    ]

    def keep(name: str, *, of: str, without: str = "") -> None:
        experiment = study(parse(to_toml(tiny)), of)
        cases, _ = matrix_cases(experiment, ["torch-manual"], ["ddp"])
        records = {
            case.name: make_record(tmp_path / "kept" / name / case.name, case.experiment, engine=case.engine)
            for case in cases
            if case.name != without
        }
        requests = {case.name: make_request(case.experiment, engine=case.engine) for case in cases}
        requests |= {name: record.request for name, record in records.items()}
        planned = comparison_of(experiment, study="matrix", requests=requests)
        save(judged(planned, records), tmp_path / "kept" / name)

    keep("float64", of="float64")
    assert main([*shown, "float64"]) == 0, capsys.readouterr()
    keep("float32", of="float32", without="torch-manual.ddp")
    capsys.readouterr()
    assert main([*shown, "float64", "float32"]) == 1
    (cell,) = json.loads(capsys.readouterr().out)
    assert cell["failures"] == {"float32": "it did not run"}
    shutil.rmtree(tmp_path / "kept" / "float32")
    keep("float32", of="float64")
    assert main([*shown, "float64", "float32"]) == 2
    why = "is of another study: reference has precision.dtype = float64 instead of float32"
    assert why in capsys.readouterr().err


def test_page_shows_errors_reasons_and_failures():
    def verdict(error: float) -> Verdict:
        rungs = [
            RungResult(rung=rung, error=error, tolerance=1e-10, worst="norm.scale", reason="")
            for rung in ("gradients", "later_weights")
        ]
        return Verdict(candidate="", reference="", rungs=rungs)

    sharded = {"parameters": [1000], "gradients": [1000], "optimizer": [2000]}
    held = {"layout": "ddp", "resident": sharded, "closed_form": sharded}
    good = Cell(engine="jax-manual", verdicts={"float64": verdict(2e-15)}, **held)
    bad = Cell(engine="torch-manual", verdicts={"float64": verdict(3e-3)}, **held)
    broken = Cell(engine="torch-library", layout="ddp", failures={"float64": "rank 1 died"})
    impossible = Cell(engine="jax-compiler", layout="ddp", refusal="it cannot be said")
    page = markdown([good, bad, broken, impossible], steps=20, version="v")
    assert "2e-15 / 2e-15 | **FAIL at gradients" in page
    assert "did not finish: rank 1 died | - |" in page
    assert "- it cannot be said" in page
    assert "1 of 3 cells pass" in page
    whole = msgspec.structs.replace(good, resident={**sharded, "optimizer": [8000]})
    assert not whole.passed
    assert "**1 / 1 / 8 (+300.0%)**" in markdown([whole], steps=20, version="v")
    assert cell_text(good, "float32") == ""
    assert not msgspec.structs.replace(good, resident={}).passed
    unseen = Verdict(candidate="", reference="", rungs=verdict(2e-15).rungs[:1])
    blind = msgspec.structs.replace(good, verdicts={"float64": unseen})
    assert not blind.passed
    assert cell_text(blind, "float64") == "2e-15 / ?"
    assert set(STUDIES) == {"float64", "float32", "float64, SGD", "float64, dropout"}
