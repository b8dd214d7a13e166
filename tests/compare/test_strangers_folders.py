"""A run's folder that a stranger sends, in an environment that a stranger made: read, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import msgspec
import pytest
from records import CORPUS, make_run

from compare import study
from compare.cli import main
from compare.host.json_files import FolderName
from compare.judge.outcome import OUTCOME
from compare.show import page

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
    make_run(tmp_path / "run", tiny)
    return tmp_path / "run"


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", ["../victim", "/etc", "..", ".", "", "a/b", "x\\0y", "n" * 256])
@pytest.mark.parametrize("command", ["run --continue run", "report run", "diff run run"])
def test_a_name_that_leaves_the_folder_is_refused(folder, capsys, monkeypatch, name, command):
    monkeypatch.setattr(study, "launch", lambda *a, **k: pytest.fail("an engine was started"))
    name = name.replace("\\0", "\0")
    saved = json.loads((folder / OUTCOME).read_text())
    cases = saved["cases"]
    cases[name] = cases.pop("jax-manual")
    change(folder / OUTCOME, cases=cases, verdicts=[])
    assert main([*command.split(), *(["--quiet"] if "continue" in command else [])]) == 2
    assert OUTCOME in capsys.readouterr().err
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run", "victim"]
    assert (folder.parent / "victim" / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cases": {"../victim": {}}}, "cannot be read"),
        ({"name": "\x1b[2J", "circumstances": {"created_utc": "9" * 400}}, "PASS"),
        ({"circumstances": {"created_utc": "0001-01-01T00:00:00+23:59"}}, "PASS"),
    ],
)
def test_runs_lists_whatever_a_folder_says_and_prunes_nothing_beside_it(folder, capsys, fields, says):
    change(folder / OUTCOME, **fields)
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
    monkeypatch.setattr(study, "launch", lambda *a, **k: pytest.fail("an engine was started"))
    monkeypatch.setattr(study, "require_same_source", lambda *a, **k: None)
    monkeypatch.setattr(study, "open_corpus", lambda one: SimpleNamespace(sha256=CORPUS))
    (folder / "jax-manual").rename(folder / "aside")
    (folder / "jax-manual").symlink_to(folder.parent / "victim")
    saved = json.loads((folder / OUTCOME).read_text())
    change(folder / OUTCOME, kept={"torch-manual": saved["kept"]["torch-manual"]}, verdicts=[])
    assert main(["run", "--continue", "run", "--quiet"]) == 1
    assert "is a link: nothing is trained, or removed, outside of run" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (folder.parent / "victim" / "precious").read_text() == "mine"


def test_a_page_that_cannot_be_drawn_costs_no_verdict(folder, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("Failed to process string with tex\nbecause latex could not be found")

    monkeypatch.setattr(page, "svg", fail)
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
