"""The command line before any training: names, version, JSON everywhere, completion."""

import json
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from records import make_comparison

from compare.cli import main
from compare.commands import doctor
from compare.commands.doctor import SideReport
from compare.judge.comparison import COMPARISON
from compare.judge.outcome import OUTCOME
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import Layout, edited, named_experiments
from compare.studies.faults import FAULTS
from compare.studies.harness_faults import HARNESS_FAULTS
from compare.studies.lessons import LESSONS
from compare.studies.presets import PRESETS

ROOT = Path(__file__).parents[2]


def test_list_names_everything_a_line_each(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split()[0] for line in lines if line.strip()]
    for name in (*named_experiments(), *PRESETS, *FAULTS, *HARNESS_FAULTS, *STUDIED, *PEERS, *LESSONS):
        assert first_words.count(name) == 1, name
    assert all(len(line) <= 160 for line in lines)


def test_list_as_json(capsys):
    assert main(["list", "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    known = {
        "experiments": named_experiments(),
        "presets": PRESETS,
        "faults": FAULTS,
        "harness_faults": HARNESS_FAULTS,
        "engines": STUDIED,
        "peers": PEERS,
        "lessons": LESSONS,
    }
    assert {kind: [entry["name"] for entry in entries] for kind, entries in everything.items()} == {
        kind: list(names) for kind, names in known.items()
    }
    assert all(entry["description"] for entries in everything.values() for entry in entries)
    (golden,) = (entry for entry in everything["experiments"] if entry["name"] == "golden")
    assert golden["description"] == "What nanoGPT itself was run on"
    assert golden["facts"] == {"parameters": 7360, "steps": 30, "dtype": "float64", "devices": 1}


@pytest.fixture
def runs(tmp_path, tiny):
    """A folder of runs: one agrees, one lacks an engine; a garbled one, a bench, and what is none."""
    folder = tmp_path / "runs"
    alone = edited(tiny, {"layout": {"bucket_mb": Layout().bucket_mb}})
    make_comparison(folder / "agrees", edited(alone, {"layout": {"dp_replicate": 2}}))
    make_comparison(folder / "lacks", alone, missing=("torch-library",))
    for name, file in (("garbled", COMPARISON), ("bench", OUTCOME), ("none", "notes.txt")):
        (folder / name).mkdir()
        (folder / name / file).write_text("{")
    (folder / "link").symlink_to(folder / "agrees")
    return folder


def test_runs_are_listed_with_layout_verdict_and_size(runs, capsys):
    assert main(["list", "--runs", str(runs), "--json"]) == 0
    found = {Path(run["folder"]).name: run for run in json.loads(capsys.readouterr().out)}
    assert found.keys() == {"agrees", "lacks", "garbled", "bench"}
    assert [found[name]["layout"] for name in ("agrees", "lacks")] == ["dp_replicate=2", "one device"]
    assert found["agrees"]["verdict"].startswith("PASS: jax-manual agrees with torch-manual")
    assert found["lacks"]["verdict"].startswith("INCOMPLETE: ")
    assert found["garbled"]["verdict"].startswith(f"{runs / 'garbled' / COMPARISON} cannot be read")
    assert found["bench"]["verdict"].startswith(f"{runs / 'bench' / OUTCOME} cannot be read")
    files = {name: [path for path in (runs / name).rglob("*") if path.is_file()] for name in found}
    for name, run in found.items():
        size = sum(file.stat().st_size for file in files[name])
        assert 0 <= run["megabytes"] * 1e6 - size < 1e6, name
    assert main(["list", "--runs", str(runs)]) == 0
    assert "luck [/x]" in " ".join(capsys.readouterr().out.split())


def test_a_folder_without_runs_says_so(tmp_path, capsys):
    assert main(["list", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("has no runs\n")
    assert main(["list", "--runs", str(tmp_path / "missing")]) == 2
    assert "missing: there is no such folder" in capsys.readouterr().err


def test_version_is_the_packages_own(capsys):
    assert main(["--version"]) == 0
    printed = capsys.readouterr().out
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert printed.startswith(f"shardpair {declared} (python ")
    assert f"torch {metadata.version('torch')}" in printed
    assert len(printed.splitlines()) == 1


def test_schedule_as_json(capsys):
    assert main(["schedule", "--json", "--names", "1f1b", "--stages", "4", "--microbatches", "8"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert costs == {
        "1f1b": {"makespan": 33.0, "waiting": pytest.approx(3 / 11), "activations_held": [4, 3, 2, 1]}
    }


@pytest.mark.parametrize("works", [True, False])
def test_doctor_as_json(capsys, monkeypatch, works):
    found = SideReport(versions={"python": "3"}, cpu_devices="many", gpus=[])
    sides = {"jaxpar": found, "torchpar": found if works else "torchpar: no such program"}
    monkeypatch.setattr(doctor, "examine", lambda side, python: sides[side])
    assert main(["doctor", "--json"]) == (0 if works else 3)
    report = json.loads(capsys.readouterr().out)
    assert report["sides"]["jaxpar"]["cpu_devices"] == "many"
    assert report["sides"]["torchpar"].get("error", "") == ("" if works else "torchpar: no such program")
    assert [engine["engine"] for engine in report["engines"]] == list(STUDIED)
    assert (report["engines"][-1]["cpu_devices"] == "not installed") != works


def test_completion_knows_the_commands_and_their_flags(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["--tyro-print-completion", "bash"])
    assert ended.value.code in (0, None)
    script = tmp_path / "shardpair"
    script.write_text(capsys.readouterr().out)
    ask = (
        f"source {script}; COMP_WORDS=(shardpair golden --pre); COMP_CWORD=2; "
        f"$(complete -p shardpair | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=False)
    assert "--preset" in done.stdout, done.stderr


def test_packages_say_that_they_are_typed():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("compare", "jaxpar", "torchpar"):
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in data[package]
    assert "goldens/*/*" in data["compare"]
