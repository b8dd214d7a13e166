"""`shardpair runs`: what was run, and what of it --prune removes; nothing else is touched."""

import datetime
import json
import os
from pathlib import Path

import msgspec
import pytest
import records
from records import make_comparison, make_record, tensors_of

from compare.api import read
from compare.cli import main
from compare.commands import runs as command
from compare.contract.record import MANIFEST, Record, read_record
from compare.contract.request import REQUEST, Request, Rung
from compare.contract.run_lock import lock_folder
from compare.host.json_files import write_json
from compare.judge.circumstances import Circumstances
from compare.judge.comparison import COMPARISON, Comparison, read_saved
from compare.judge.ladder import RungResult, Verdict
from compare.judge.outcome import OUTCOME as STUDY
from compare.judge.outcome import save
from compare.present.tables import REMOVED
from compare.spec.experiment import Layout, edited, to_toml
from compare.studies import paired_run
from compare.studies.matrix_cells import Cell, MatrixOutcome
from compare.studies.presets import NOTHING_SAID
from compare.terminal.units import human_days


@pytest.fixture
def runs(tmp_path, tiny):
    """A folder of runs: one agrees, one lacks an engine; a garbled one, a bench, and what is none."""
    folder = tmp_path / "runs"
    alone = edited(tiny, {"layout": {"bucket_mb": Layout().bucket_mb}})
    make_comparison(folder / "agrees", edited(alone, {"layout": {"dp_replicate": 2}}))
    make_comparison(folder / "lacks", alone, missing=("torch-library",))
    for name, file in (("garbled", COMPARISON), ("bench", STUDY), ("none", "notes.txt")):
        (folder / name).mkdir()
        (folder / name / file).write_text("{")
    (folder / "link").symlink_to(folder / "agrees")
    return folder


@pytest.fixture
def set_aside(tmp_path, tiny):
    """A folder of one run whose torch-manual was run again: what the first attempt left lies beside it."""
    folder = tmp_path / "runs" / "again"
    make_comparison(folder, tiny, names=("torch-manual",))
    make_record(folder / "torch-manual.unfinished-1", tiny)
    (folder / "torch-manual.unfinished-1" / MANIFEST).unlink()
    return folder / "torch-manual.unfinished-1"


def told(capsys, *arguments: object) -> dict:
    assert main(["runs", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_are_listed_with_layout_verdict_age_and_size(runs, capsys):
    found = {Path(run["folder"]).name: run for run in told(capsys, runs)}
    assert found.keys() == {"agrees", "lacks", "garbled", "bench"}
    assert [found[name]["layout"] for name in ("agrees", "lacks")] == ["dp_replicate=2", "one device"]
    assert found["agrees"]["verdict"].startswith("PASS: jax-manual agrees with torch-manual")
    assert found["lacks"]["verdict"].startswith("INCOMPLETE: ")
    assert found["garbled"]["verdict"].startswith(f"{runs / 'garbled' / COMPARISON} cannot be read")
    assert found["bench"]["verdict"].startswith(f"{runs / 'bench' / STUDY} cannot be read")
    files = {name: [path for path in (runs / name).rglob("*") if path.is_file()] for name in found}
    for name, run in found.items():
        assert run["bytes"] == sum(file.stat().st_size for file in files[name]), name
    assert main(["runs", str(runs)]) == 0
    assert "[/x]" in capsys.readouterr().out


def test_a_run_says_its_age(runs, capsys):
    ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3, hours=1)
    saved = json.loads((runs / "lacks" / COMPARISON).read_text())
    for created, age in ((ago.isoformat(), "3 days"), ("long ago", "")):
        circumstances = saved["circumstances"] | {"created_utc": created}
        write_json(runs / "lacks" / COMPARISON, saved | {"circumstances": circumstances})
        assert main(["runs", str(runs / "lacks")]) == 0
        assert age in capsys.readouterr().out
    assert [human_days(seconds) for seconds in (-5, 90, 150, 8000, 172800)] == [
        "0 s",
        "90 s",
        "2 min",
        "2 h",
        "2 days",
    ]


def test_a_matrix_and_a_golden_say_their_verdict(tmp_path, capsys, tiny):
    cell = Cell(engine="jax-manual", layout="ddp", failures={"float64": "lost"})
    asked = {"engines": ["jax-manual"], "layouts": ["ddp"], "studies": ["float64"], "said": NOTHING_SAID}
    head = {"name": "", "experiment": tiny, "platform": "cpu", "circumstances": Circumstances()}
    (tmp_path / "matrix-1").mkdir()
    save(MatrixOutcome(study="matrix", cells=[cell], **asked, **head), tmp_path / "matrix-1")
    held = RungResult(rung="loss", error=0.0, tolerance=1.0, worst="", reason="")
    verdict = Verdict(candidate="jax-manual", reference="nanoGPT", rungs=[held])
    (tmp_path / "golden-1").mkdir()
    save(
        Comparison(study="golden", cases=["jax-manual"], verdicts=[verdict], requests={}, **head),
        tmp_path / "golden-1",
    )
    found = {run["command"]: run["verdict"] for run in told(capsys, tmp_path)}
    assert found["matrix"] == "0 of 1 cells pass"
    assert found["golden"].startswith("PASS: jax-manual agrees with nanoGPT on 1 rungs")


def renamed(comparison, command):
    return msgspec.structs.replace(comparison, study=command)


def test_a_folder_without_runs_says_so(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("has no runs\n")
    assert main(["runs", str(tmp_path / "missing")]) == 2
    assert "missing: there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--keep 2", "--keep has no effect without --prune"),
        ("--older_than 2", "--older_than has no effect without --prune"),
        ("--yes", "--yes has no effect without --prune"),
        ("--prune --keep -1", "--keep -1 must be at least 0"),
        ("--prune --older_than nan", "--older_than nan must be at least 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, capsys, flags, says):
    assert main(["runs", str(tmp_path), *flags.split()]) == 2
    assert says in capsys.readouterr().err


def test_pruning_says_what_it_would_remove_and_waits_for_yes(set_aside, capsys):
    folder = set_aside.parent
    size = sum(path.stat().st_size for path in set_aside.iterdir())
    assert main(["runs", str(folder.parent), "--prune"]) == 0
    said = capsys.readouterr().out
    assert set_aside.name in said.replace("\n", "")
    assert f"nothing was removed: `shardpair runs {folder.parent} --prune --yes` removes it" in said
    planned = told(capsys, folder, "--prune")
    assert (planned["removed"], planned["bytes"], len(planned["removals"])) == (False, size, 1)
    assert set_aside.is_dir()
    before = sorted(path for path in folder.rglob("*") if set_aside not in (path, *path.parents))
    assert told(capsys, folder, "--prune", "--yes")["removed"] is True
    assert sorted(folder.rglob("*")) == before
    assert main(["report", str(folder), "--json"]) == 0
    capsys.readouterr()
    assert told(capsys, folder, "--prune", "--yes")["removals"] == []


@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("Yes ", True), ("", False), ("no", False)])
def test_a_terminal_is_asked(set_aside, capsys, monkeypatch, answer, goes):
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(command.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert main(["runs", str(set_aside.parent), "--prune"]) == 0
    assert set_aside.is_dir() != goes
    assert ("are free again" in capsys.readouterr().out) == goes


def test_the_newest_and_the_young_are_left_as_they_are(set_aside, capsys):
    folder = set_aside.parent
    for flags in (("--keep", 1), ("--keep", 9), ("--older_than", 36500)):
        assert told(capsys, folder, "--prune", "--yes", *flags)["removals"] == [], flags
    saved = read_saved(folder)
    write_json(folder / COMPARISON, msgspec.structs.replace(saved, circumstances=Circumstances()))
    assert told(capsys, folder, "--prune", "--older_than", 1e-9)["removals"] == []  # it says no age
    write_json(folder / COMPARISON, saved)
    assert len(told(capsys, folder, "--prune", "--older_than", 1)["removals"]) == 1


@pytest.mark.parametrize("which", ["the run", "what was set aside"])
def test_nothing_is_removed_where_a_run_is_at_work(set_aside, capsys, which):
    folder = set_aside.parent
    with lock_folder(folder if which == "the run" else set_aside):
        found = told(capsys, folder.parent, "--prune", "--yes")
        assert found["removals"] == []
        assert "in use by another run" in found["left_alone"][str(folder)]
        assert main(["runs", str(folder), "--prune"]) == 0
        assert "left alone: " in capsys.readouterr().err
    assert set_aside.is_dir()


def no_request(aside: Path) -> None:
    (aside / "request.json").unlink()


def unknown_case(aside: Path) -> None:
    aside.rename(aside.with_name("precious.unfinished-1"))


def a_link(aside: Path) -> None:
    aside.rename(aside.parents[2] / "elsewhere")
    aside.symlink_to(aside.parents[2] / "elsewhere")


def never_finished(aside: Path) -> None:
    (aside.parent / "torch-manual" / MANIFEST).unlink()


def garbled(aside: Path) -> None:
    (aside.parent / COMPARISON).write_text("{")


def linked_run(aside: Path) -> None:
    run = aside.parent
    run.rename(run.parents[1] / "elsewhere")
    run.symlink_to(run.parents[1] / "elsewhere")


@pytest.mark.parametrize("change", [no_request, unknown_case, a_link, never_finished, garbled, linked_run])
def test_what_is_not_surely_superseded_stays(set_aside, capsys, change):
    change(set_aside)
    top = set_aside.parents[2]
    before = sorted(os.walk(top, followlinks=True))
    found = told(capsys, set_aside.parents[1], "--prune", "--yes")
    assert (found["removals"], found["removed"]) == ([], False)
    assert sorted(os.walk(top, followlinks=True)) == before


def test_links_inside_of_what_was_set_aside_are_not_followed(set_aside, tmp_path, capsys):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("mine")
    (set_aside / "checkpoints").symlink_to(tmp_path / "victim")
    assert told(capsys, set_aside.parent, "--prune", "--yes")["removed"] is True
    assert not set_aside.exists()
    assert (tmp_path / "victim" / "precious").read_text() == "mine"


@pytest.fixture
def passed(tmp_path, tiny):
    """A run that passed, with its tensors, and the size of them."""
    make_comparison(tmp_path / "run", tiny)
    return tmp_path / "run"


def tensors_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def pruned(folder: Path, capsys) -> None:
    assert told(capsys, folder, "--prune", "--yes")["removed"] is True
    assert tensors_in(folder) == []
    assert read_saved(folder).tensors_removed


def test_tensors_of_a_run_that_passed_go_and_its_rungs_stay(passed, capsys):
    before, size = read_saved(passed), sum(path.stat().st_size for path in tensors_in(passed))
    assert told(capsys, passed, "--prune")["bytes"] == size
    assert len(tensors_in(passed)) > 10
    pruned(passed, capsys)
    assert told(capsys, passed, "--prune")["removals"] == []
    assert main(["report", str(passed), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tensors_removed"] is True
    assert shown["verdicts"] == json.loads(msgspec.json.encode(before.verdicts))
    assert main(["report", str(passed)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert REMOVED in said
    assert "PASS: jax-manual agrees" in said
    assert REMOVED in (passed / "report.html").read_text()


def test_a_report_with_tensors_does_not_say_that_they_were_removed(passed, capsys):
    assert main(["report", str(passed)]) == 0
    assert REMOVED not in " ".join(capsys.readouterr().out.split())
    assert REMOVED not in (passed / "report.html").read_text()


def test_tensors_that_somebody_removed_are_no_pass(passed, capsys):
    for path in tensors_in(passed):
        path.unlink()
    assert main(["report", str(passed)]) == 1
    assert "it left no batch" in capsys.readouterr().out


def test_tensors_stay_where_a_side_is_at_work(passed, capsys):
    before = tensors_in(passed)
    with lock_folder(passed / "jax-manual"):
        assert told(capsys, passed, "--prune", "--yes")["left_alone"].keys() == {str(passed)}
    assert tensors_in(passed) == before


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_what_needs_no_tensor_is_judged_anew(passed, capsys, field):
    pruned(passed, capsys)
    path = passed / "jax-manual" / "steps.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    steps[-1][field] *= 1.5
    path.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    assert main(["report", str(passed)]) == 1
    output = capsys.readouterr()
    assert "FAIL at " in output.out
    assert "no longer give the saved verdict" in output.err


def test_a_run_that_failed_keeps_everything(tmp_path, tiny, capsys):
    wrong = tensors_of(tiny)
    wrong[Rung.GRADIENTS] = {name: tensor + 1 for name, tensor in wrong[Rung.GRADIENTS].items()}
    make_comparison(tmp_path / "failed", tiny, tensors=wrong)
    make_comparison(tmp_path / "lacks", tiny, missing=("torch-library",))
    make_comparison(tmp_path / "alone", tiny, names=("torch-manual",))
    before = tensors_in(tmp_path)
    assert told(capsys, tmp_path, "--prune", "--yes")["removals"] == []
    assert tensors_in(tmp_path) == before


def test_tensors_behind_a_link_stay(passed, tmp_path, capsys):
    (passed / "jax-manual").rename(tmp_path / "elsewhere")
    (passed / "jax-manual").symlink_to(tmp_path / "elsewhere")
    (passed / "torch-manual" / "batch.safetensors").rename(tmp_path / "precious")
    (passed / "torch-manual" / "batch.safetensors").symlink_to(tmp_path / "precious")
    kept = len(tensors_in(tmp_path / "elsewhere"))
    assert told(capsys, passed, "--prune", "--yes")["removed"] is True
    assert len(tensors_in(tmp_path / "elsewhere")) == kept > 5
    assert (tmp_path / "precious").is_file()
    assert [path.name for path in tensors_in(passed / "torch-manual")] == ["batch.safetensors"]


def test_other_commands_read_a_run_without_tensors(passed, tmp_path, capsys, tiny):
    make_comparison(tmp_path / "whole", tiny)
    pruned(passed, capsys)
    assert main(["ledger", "--results", str(passed), "--json"]) == 0
    capsys.readouterr()
    assert main(["diff", str(passed), str(tmp_path / "whole"), "--json"]) == 0
    skipped = json.loads(capsys.readouterr().out)["pairs"]["jax-manual"]["verdict"]["skipped"]
    assert skipped["gradients"].startswith("no tensors of it in A: ")
    assert read(passed).passed
    with pytest.raises(ValueError, match="--keep_tensors"):
        read(passed)["jax-manual"].tensors("gradients")


def test_continuing_a_run_without_tensors_trains_nothing(passed, capsys, monkeypatch):
    monkeypatch.setattr(paired_run, "launch", lambda *a, **k: pytest.fail("an engine was started"))
    pruned(passed, capsys)
    assert main(["run", "--continue", str(passed), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors_removed"] is True
    (passed / "jax-manual" / MANIFEST).unlink()
    assert main(["run", "--continue", str(passed), "--quiet"]) == 2
    assert "run it anew, with --keep_tensors" in capsys.readouterr().err


def test_a_run_removes_its_tensors_unless_they_are_to_be_kept(tmp_path, tiny, capsys, monkeypatch):
    def train(request: Request, folder: Path, **options) -> Record:
        monkeypatch.setattr(records, "CORPUS", request.corpus_sha256)
        make_record(folder, request.experiment, engine=request.engine)
        write_json(folder / REQUEST, request)
        return read_record(folder)

    monkeypatch.setattr(paired_run, "launch", train)
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(to_toml(edited(tiny, {"data": {"source": "synthetic"}})))
    engines = ("--engines", "torch-manual", "torch-library", "--quiet")
    for name, flags in (("kept", ("--keep_tensors",)), ("gone", ())):
        assert main(["run", "tiny.toml", *engines, "--run_dir", name, *flags]) == 0
        assert bool(tensors_in(Path(name))) == (name == "kept")
        assert (REMOVED in " ".join(capsys.readouterr().out.split())) == (name == "gone")
