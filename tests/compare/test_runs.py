"""`shardpair runs`: what was run, and what of it --prune removes; nothing else is touched."""

import datetime
import json
import os
from pathlib import Path

import msgspec
import pytest
from records import make_record, make_run

from compare.cli import main
from compare.commands import runs as command
from compare.contract.record import MANIFEST
from compare.contract.run_lock import lock_folder
from compare.host.json_files import write_json
from compare.judge.circumstances import Circumstances
from compare.judge.outcome import OUTCOME, read_outcome
from compare.spec.experiment import Layout, edited
from compare.terminal import human_days


@pytest.fixture
def runs(tmp_path, tiny):
    """A folder of runs: one agrees, one lacks an engine; a garbled one, a bench, and what is none."""
    folder = tmp_path / "runs"
    alone = edited(tiny, {"layout": {"bucket_mb": Layout().bucket_mb}})
    make_run(folder / "agrees", edited(alone, {"layout": {"dp_replicate": 2}}))
    make_run(folder / "lacks", alone, missing=("torch-library",))
    for name, file in (("garbled", OUTCOME), ("bench", OUTCOME), ("none", "notes.txt")):
        (folder / name).mkdir()
        (folder / name / file).write_text("{")
    (folder / "link").symlink_to(folder / "agrees")
    return folder


@pytest.fixture
def set_aside(tmp_path, tiny):
    """A folder of one run whose torch-manual was run again: what the first attempt left lies beside it."""
    folder = tmp_path / "runs" / "again"
    make_run(folder, tiny, names=("torch-manual",))
    make_record(folder / "torch-manual.unfinished-1", tiny)
    (folder / "torch-manual.unfinished-1" / MANIFEST).unlink()
    return folder / "torch-manual.unfinished-1"


def test_runs_are_listed_with_layout_verdict_age_and_size(runs, told, capsys):
    found = {Path(run["folder"]).name: run for run in told(runs)}
    assert found.keys() == {"agrees", "lacks", "garbled", "bench"}
    assert [found[name]["layout"] for name in ("agrees", "lacks")] == ["dp_replicate=2", "one device"]
    assert found["agrees"]["verdict"].startswith("PASS: jax-manual agrees with torch-manual")
    assert found["lacks"]["verdict"].startswith("INCOMPLETE: ")
    assert found["garbled"]["verdict"].startswith(f"{runs / 'garbled' / OUTCOME} cannot be read")
    assert found["bench"]["verdict"].startswith(f"{runs / 'bench' / OUTCOME} cannot be read")
    files = {name: [path for path in (runs / name).rglob("*") if path.is_file()] for name in found}
    for name, run in found.items():
        assert run["bytes"] == sum(file.stat().st_size for file in files[name]), name
    assert main(["runs", str(runs)]) == 0
    assert "[/x]" in capsys.readouterr().out


def test_a_run_says_its_age(runs, capsys):
    ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3, hours=1)
    saved = json.loads((runs / "lacks" / OUTCOME).read_text())
    for created, age in ((ago.isoformat(), "3 days"), ("long ago", "")):
        circumstances = saved["circumstances"] | {"created_utc": created}
        write_json(runs / "lacks" / OUTCOME, saved | {"circumstances": circumstances})
        assert main(["runs", str(runs / "lacks")]) == 0
        assert age in capsys.readouterr().out
    assert [human_days(seconds) for seconds in (-5, 90, 150, 8000, 172800)] == [
        "0 s",
        "90 s",
        "2 min",
        "2 h",
        "2 days",
    ]


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


def test_pruning_says_what_it_would_remove_and_waits_for_yes(set_aside, told, capsys):
    folder = set_aside.parent
    size = sum(path.stat().st_size for path in set_aside.iterdir())
    assert main(["runs", str(folder.parent), "--prune"]) == 0
    said = capsys.readouterr().out
    assert set_aside.name in said.replace("\n", "")
    assert f"nothing was removed: `shardpair runs {folder.parent} --prune --yes` removes it" in said
    planned = told(folder, "--prune")
    assert (planned["removed"], planned["bytes"], len(planned["removals"])) == (False, size, 1)
    assert set_aside.is_dir()
    before = sorted(path for path in folder.rglob("*") if set_aside not in (path, *path.parents))
    assert told(folder, "--prune", "--yes")["removed"] is True
    assert sorted(folder.rglob("*")) == before
    assert main(["report", str(folder), "--json"]) == 0
    capsys.readouterr()
    assert told(folder, "--prune", "--yes")["removals"] == []


@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("Yes ", True), ("", False), ("no", False)])
def test_a_terminal_is_asked(set_aside, capsys, monkeypatch, answer, goes):
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(command.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert main(["runs", str(set_aside.parent), "--prune"]) == 0
    assert set_aside.is_dir() != goes
    assert ("are free again" in capsys.readouterr().out) == goes


def test_the_newest_and_the_young_are_left_as_they_are(set_aside, told):
    folder = set_aside.parent
    for flags in (("--keep", 1), ("--keep", 9), ("--older_than", 36500)):
        assert told(folder, "--prune", "--yes", *flags)["removals"] == [], flags
    saved = read_outcome(folder)
    write_json(folder / OUTCOME, msgspec.structs.replace(saved, circumstances=Circumstances()))
    assert told(folder, "--prune", "--older_than", 1e-9)["removals"] == []  # it says no age
    write_json(folder / OUTCOME, saved)
    assert len(told(folder, "--prune", "--older_than", 1)["removals"]) == 1


@pytest.mark.parametrize("which", ["the run", "what was set aside"])
def test_nothing_is_removed_where_a_run_is_at_work(set_aside, told, capsys, which):
    folder = set_aside.parent
    with lock_folder(folder if which == "the run" else set_aside):
        found = told(folder.parent, "--prune", "--yes")
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
    (aside.parent / OUTCOME).write_text("{")


def linked_run(aside: Path) -> None:
    run = aside.parent
    run.rename(run.parents[1] / "elsewhere")
    run.symlink_to(run.parents[1] / "elsewhere")


@pytest.mark.parametrize("change", [no_request, unknown_case, a_link, never_finished, garbled, linked_run])
def test_what_is_not_surely_superseded_stays(set_aside, told, change):
    change(set_aside)
    top = set_aside.parents[2]
    before = sorted(os.walk(top, followlinks=True))
    found = told(set_aside.parents[1], "--prune", "--yes")
    assert (found["removals"], found["removed"]) == ([], False)
    assert sorted(os.walk(top, followlinks=True)) == before


def test_links_inside_of_what_was_set_aside_are_not_followed(set_aside, tmp_path, told):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("mine")
    (set_aside / "checkpoints").symlink_to(tmp_path / "victim")
    assert told(set_aside.parent, "--prune", "--yes")["removed"] is True
    assert not set_aside.exists()
    assert (tmp_path / "victim" / "precious").read_text() == "mine"
