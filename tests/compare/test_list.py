"""The command line before any training: names, version, JSON everywhere, completion."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from compare.cli import main
from compare.commands import doctor
from compare.commands.doctor import SideReport
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import named_experiments
from compare.studies.faults import FAULTS
from compare.studies.lessons import LESSONS
from compare.studies.presets import PRESETS

ROOT = Path(__file__).parents[2]


def test_list_names_everything_a_line_each(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split()[0] for line in lines if line.strip()]
    assert main(["list", "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    for title, known in {
        "experiments": named_experiments(),
        "presets": PRESETS,
        "faults": FAULTS,
        "engines": STUDIED,
        "peers": PEERS,
        "lessons": LESSONS,
    }.items():
        assert [entry["name"] for entry in everything[title]] == list(known)
        assert all(first_words.count(name) == 1 for name in known), title
        assert all(entry["description"] for entry in everything[title])


def test_version_is_the_packages_own(capsys):
    assert main(["--version"]) == 0
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out.startswith(f"shardpair {declared} (python ")


def test_doctor_as_json(capsys, monkeypatch):
    report = SideReport(versions={"python": "3"}, cpu_devices="many", gpus=[])
    for other in (report, "torchpar: no such program"):
        sides = {"jaxpar": report, "torchpar": other}
        monkeypatch.setattr(doctor, "examine", lambda side, python, sides=sides: sides[side])
        assert main(["doctor", "--json"]) == (0 if other is report else 3)
        said = json.loads(capsys.readouterr().out)
        assert said["sides"]["jaxpar"]["cpu_devices"] == "many"
        assert said["sides"]["torchpar"].get("error") == (None if other is report else other)


def test_completion_knows_the_commands_and_their_flags(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["--tyro-print-completion", "bash"])
    assert ended.value.code in (0, None)
    script = tmp_path / "shardpair"
    script.write_text(capsys.readouterr().out)
    ask = (
        f"source {script}; COMP_WORDS=(shardpair run --pre); COMP_CWORD=2; "
        f"$(complete -p shardpair | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=False)
    assert "--preset" in done.stdout, done.stderr
