"""`shardpair runs`: what was run, and what of it --prune removes; nothing else is touched."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from records import make_record, make_run, tensors_of

from compare.cli import main
from compare.contract.record import MANIFEST
from compare.contract.request import Rung
from compare.contract.run_lock import lock_folder
from compare.judge.outcome import OUTCOME
from compare.spec.experiment import Layout, edited


@pytest.fixture
def set_aside(tmp_path, tiny):
    """A folder of one run whose torch-manual was run again: what the first attempt left lies beside it."""
    folder = tmp_path / "runs" / "again"
    make_run(folder, tiny, names=("torch-manual",))
    make_record(folder / "torch-manual.unfinished-1", tiny)
    (folder / "torch-manual.unfinished-1" / MANIFEST).unlink()
    return folder / "torch-manual.unfinished-1"


def test_runs_are_listed_with_layout_verdict_and_size(tmp_path, tiny, told, capsys):
    runs = tmp_path / "runs"
    alone = edited(tiny, {"layout": {"bucket_mb": Layout().bucket_mb}})
    make_run(runs / "agrees", edited(alone, {"layout": {"dp_replicate": 2}}))
    make_run(runs / "lacks", alone, missing=("torch-library",))
    for name, file in (("garbled", OUTCOME), ("none", "notes.txt")):
        (runs / name).mkdir()
        (runs / name / file).write_text("{")
    (runs / "link").symlink_to(runs / "agrees")
    found = {Path(run["folder"]).name: run for run in told(runs)}
    assert found.keys() == {"agrees", "lacks", "garbled"}
    assert [found[name]["layout"] for name in ("agrees", "lacks")] == ["dp_replicate=2", "one device"]
    assert found["agrees"]["verdict"].startswith("PASS: jax-manual agrees with torch-manual")
    assert found["lacks"]["verdict"].startswith("INCOMPLETE: ")
    assert found["garbled"]["verdict"].startswith(f"{runs / 'garbled' / OUTCOME} cannot be read")
    for name, run in found.items():
        files = (path for path in (runs / name).rglob("*") if path.is_file())
        assert run["bytes"] == sum(file.stat().st_size for file in files), name
    assert main(["runs", str(runs)]) == 0
    assert "[/x]" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "missing")]) == 2
    assert "missing: there is no such folder" in capsys.readouterr().err


def test_pruning_says_what_it_would_remove_and_waits_for_yes(set_aside, told, capsys):
    folder = set_aside.parent
    size = sum(path.stat().st_size for path in set_aside.iterdir())
    assert main(["runs", str(folder.parent), "--prune"]) == 0
    assert "can be removed: give --yes" in capsys.readouterr().out
    planned = told(folder, "--prune")
    assert (planned["removed"], planned["bytes"], len(planned["removals"])) == (False, size, 1)
    assert set_aside.is_dir()
    before = sorted(path for path in folder.rglob("*") if set_aside not in (path, *path.parents))
    assert told(folder, "--prune", "--yes")["removed"] is True
    assert sorted(folder.rglob("*")) == before
    assert main(["report", str(folder), "--json"]) == 0
    capsys.readouterr()
    assert told(folder, "--prune", "--yes")["removals"] == []


def test_nothing_is_removed_where_a_run_is_at_work(set_aside, told, capsys):
    folder = set_aside.parent
    for held in (folder, set_aside):
        with lock_folder(held):
            found = told(folder.parent, "--prune", "--yes")
            assert found["removals"] == []
            assert "in use by another run" in found["left_alone"][str(folder)]
            assert main(["runs", str(folder), "--prune"]) == 0
            assert "left alone: " in capsys.readouterr().err
    assert set_aside.is_dir()


def elsewhere(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


NOT_SUPERSEDED: dict[str, Callable[[Path], object]] = {
    "no request": lambda aside: (aside / "request.json").unlink(),
    "unknown case": lambda aside: aside.rename(aside.with_name("precious.unfinished-1")),
    "a link": elsewhere,
    "the case never finished": lambda aside: (aside.parent / "torch-manual" / MANIFEST).unlink(),
    "garbled": lambda aside: (aside.parent / OUTCOME).write_text("{"),
    "a linked run": lambda aside: elsewhere(aside.parent),
}


@pytest.mark.parametrize("change", NOT_SUPERSEDED)
def test_what_is_not_surely_superseded_stays(set_aside, told, change):
    NOT_SUPERSEDED[change](set_aside)
    top = set_aside.parents[2]
    before = sorted(os.walk(top, followlinks=True))
    assert told(set_aside.parents[1], "--prune", "--yes")["removals"] == []
    assert sorted(os.walk(top, followlinks=True)) == before


def test_links_inside_of_what_was_set_aside_are_not_followed(set_aside, tmp_path, told):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("mine")
    (set_aside / "checkpoints").symlink_to(tmp_path / "victim")
    assert told(set_aside.parent, "--prune", "--yes")["removed"] is True
    assert not set_aside.exists()
    assert (tmp_path / "victim" / "precious").read_text() == "mine"


def test_a_run_that_failed_keeps_its_tensors(tmp_path, tiny, told):
    wrong = tensors_of(tiny)
    wrong[Rung.GRADIENTS] = {name: tensor + 1 for name, tensor in wrong[Rung.GRADIENTS].items()}
    make_run(tmp_path / "failed", tiny, tensors=wrong)
    make_run(tmp_path / "lacks", tiny, missing=("torch-library",))
    make_run(tmp_path / "alone", tiny, names=("torch-manual",))
    before = sorted(tmp_path.rglob("*.safetensors"))
    assert told(tmp_path, "--prune", "--yes")["removals"] == []
    assert sorted(tmp_path.rglob("*.safetensors")) == before
