"""A run's folder that a stranger sends, in an environment that a stranger made: read, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import msgspec
import pytest
from records import make_comparison

from compare.cli import main
from compare.host.json_files import FolderName
from compare.judge.comparison import COMPARISON
from compare.present.report import render
from compare.studies import paired_run

RC = """
text.usetex: True
figure.dpi: 9
svg.fonttype: path
font.family: monospace
axes.prop_cycle: cycler(color=["red"])
savefig.facecolor: blue
lines.linewidth: 30
"""


@pytest.fixture
def folder(tmp_path, tiny, monkeypatch):
    """A finished run of two engines, beside a victim."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("mine")
    make_comparison(tmp_path / "run", tiny)
    return tmp_path / "run"


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", ["../victim", "/etc", "..", ".", "", "a/b", "x\\0y", "n" * 256])
@pytest.mark.parametrize("command", ["run --continue run", "report run", "diff run run"])
def test_a_name_that_leaves_the_folder_is_refused(folder, capsys, monkeypatch, name, command):
    monkeypatch.setattr(paired_run, "launch", lambda *a, **k: pytest.fail("an engine was started"))
    name = name.replace("\\0", "\0")
    saved = json.loads((folder / COMPARISON).read_text())
    requests = saved["requests"]
    requests[name] = requests.pop("jax-manual")
    change(folder / COMPARISON, requests=requests, cases=["torch-manual"], verdicts=[])
    assert main([*command.split(), *(["--quiet"] if "continue" in command else [])]) == 2
    assert COMPARISON in capsys.readouterr().err
    change(folder / COMPARISON, cases=["torch-manual", name])
    assert main(["report", "run"]) == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run", "victim"]
    assert (folder.parent / "victim" / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cases": ["../victim"]}, "cannot be read"),
        ({"cases": [], "objections": ["odd"], "verdicts": []}, "cannot be judged (IndexError"),
        ({"name": "\x1b[2J", "circumstances": {"created_utc": "9" * 400}}, "PASS"),
        ({"circumstances": {"created_utc": "0001-01-01T00:00:00+23:59"}}, "PASS"),
    ],
)
def test_runs_lists_whatever_a_folder_says_and_prunes_nothing_beside_it(folder, capsys, fields, says):
    change(folder / COMPARISON, **fields)
    (folder / "..unfinished-1").mkdir()
    (folder / "victim.unfinished-1").symlink_to(folder.parent / "victim")
    before = {path for path in folder.parent.rglob("*") if path.suffix != ".safetensors"}
    assert main(["runs", "."]) == 0
    output = capsys.readouterr()
    assert says in output.out.replace("\n", "") or says in " ".join(output.out.split())
    assert "\x1b" not in output.out
    assert main(["runs", ".", "--prune", "--yes"]) == 0
    assert {path for path in folder.parent.rglob("*") if path.suffix != ".safetensors"} == before


def test_names_of_our_own_are_folders():
    for name in ("torch-manual", "torch-manual.fsdp.2", "batch-16", "..x", "round 1, a"):
        assert msgspec.convert(name, FolderName) == name


def test_a_linked_case_is_not_trained_anew(folder, capsys, monkeypatch):
    monkeypatch.setattr(paired_run, "launch", lambda *a, **k: pytest.fail("an engine was started"))
    (folder / "jax-manual").rename(folder / "aside")
    (folder / "jax-manual").symlink_to(folder.parent / "victim")
    assert main(["run", "--continue", "run", "--quiet"]) == 2
    assert "is a link: nothing is trained, or set aside, outside of run" in capsys.readouterr().err
    assert (folder.parent / "victim" / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("layout", "train", "says"),
    [
        ({"dp_replicate": 2**31 - 1}, {}, "says that it ran on 2147483647 CPU devices"),
        ({"pp": 2_000_000}, {}, "says that it ran on 2000000 CPU devices"),
        ({}, {"max_iters": 2**31 - 1}, "has 3 of 2147483647 steps: it is not a finished run"),
    ],
)
def test_sizes_that_no_run_has_are_refused_at_once(folder, capsys, layout, train, says):
    saved = json.loads((folder / COMPARISON).read_text())
    manifest = json.loads((folder / "jax-manual" / "manifest.json").read_text())
    for place in (saved, saved["requests"]["jax-manual"], manifest):
        place["experiment"]["layout"] |= layout
        place["experiment"]["train"] |= train
    change(folder / COMPARISON, requests=saved["requests"])
    change(folder / "jax-manual" / "manifest.json", experiment=manifest["experiment"])
    change(folder / "jax-manual" / "request.json", experiment=manifest["experiment"])
    assert main(["report", "run"]) == 2
    assert says in capsys.readouterr().err
    assert main(["diff", "run", "run"]) == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"engine": "zzz"},
            "is of zzz, and here are jax-compiler, jax-explicit, jax-manual, torch-manual, torch-library",
        ),
        ({"peak_memory_bytes": []}, "cannot be judged (ValueError"),
        ({"resident_bytes": {"parameters": []}}, "cannot be judged"),
    ],
)
def test_a_manifest_that_no_engine_writes_is_one_line(folder, capsys, fields, says):
    change(folder / "jax-manual" / "manifest.json", **fields)
    code = main(["report", "run"])
    output = capsys.readouterr()
    assert code in (1, 2)
    assert says in output.err or "FAIL at request" in output.out
    assert "Traceback" not in output.err
    assert main(["diff", "run", "run/torch-manual"]) in (0, 1, 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"step_time_ms": 0}, "ZeroDivisionError"), ({"loss": 1e308}, "OverflowError")],
)
def test_steps_that_no_run_has_are_one_line(folder, capsys, fields, says):
    path = folder / "jax-manual" / "steps.jsonl"
    steps = [json.loads(line) | fields for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    assert main(["report", "run"]) == 2
    assert f"the records in run cannot be judged ({says}" in capsys.readouterr().err
    assert main(["diff", "run/torch-manual", "run/jax-manual"]) in (1, 2)


def test_weights_of_a_model_that_is_not_there_are_not_drawn(folder, capsys):
    """Both runs ask for terabytes of weights and left kilobytes: shapes are held first."""
    saved = json.loads((folder / COMPARISON).read_text())
    for name, request in saved["requests"].items():
        request["experiment"]["model"] |= {"n_embd": 2**20}
        for file in ("manifest.json", "request.json"):
            change(folder / name / file, experiment=request["experiment"])
    change(folder / COMPARISON, requests=saved["requests"])
    assert main(["report", "run"]) == 1
    assert "FAIL at request: torch-manual: it ran with parameters = " in capsys.readouterr().out


def test_a_page_that_cannot_be_drawn_costs_no_verdict(folder, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("Failed to process string with tex\nbecause latex could not be found")

    monkeypatch.setattr(render, "render_page", fail)
    assert main(["report", "run"]) == 0
    output = capsys.readouterr()
    assert "PASS" in output.out
    assert "report:" not in output.out
    assert output.err == (
        "no page: it could not be drawn (RuntimeError: Failed to process string with tex because latex "
        "could not be found); the result stands\n"
    )
    assert main(["report", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"]


def test_a_strangers_matplotlibrc_and_kernel_change_no_page(folder):
    """As Jupyter leaves MPLBACKEND, and with settings that ask for LaTeX: the same page, byte for byte."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MPL")}
    fonts = list(Path(matplotlib.get_cachedir()).glob("fontlist-*.json"))
    for name, rc in {"kind": "", "hostile": RC}.items():
        (folder.parent / name).mkdir()
        for known in fonts:  # a look at every font of the machine takes seconds
            shutil.copy(known, folder.parent / name)
        (folder.parent / name / "matplotlibrc").write_text(rc)
    kind = plain | {"MPLCONFIGDIR": str(folder.parent / "kind")}
    backend = "module://matplotlib_inline.backend_inline"
    hostile = plain | {"MPLCONFIGDIR": str(folder.parent / "hostile"), "MPLBACKEND": backend}
    pages = []
    for environment in (kind, hostile):
        command = [sys.executable, "-m", "compare", "report", "run"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "report: run/report.html" in done.stdout
        pages.append((folder / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_the_command_line_loads_no_matplotlib():
    script = "import sys, compare.cli, compare.api; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("compare.cli._dispatch", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "shardpair: error: interrupted; every process was ended\n"
