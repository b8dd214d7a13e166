"""A Python that lacks something is rejected in one line with its flag and exit code 3; no file is written."""

import sys

import pytest

from compare.cli import main
from compare.execute import pythons
from compare.execute.folders import create_run_dir, remove_run_dir

ARGUMENTS = ["run", "check", "--engines", "torch-manual", "--quiet"]


def program(folder, name: str, content: bytes) -> str:
    path = folder / name
    path.write_bytes(content)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("flag", ["--torch_python", "--jax_python"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', "shardpair is not installed there (no "),
        ("#!/nowhere/python\n", "it cannot be run (No such file or directory)"),
        ("\x7fELF" + 100 * "\0", "it cannot be run (Exec format error)"),
        ("#!/bin/sh\nexit 0\n", "it answers as no Python"),
        (
            "#!/bin/sh\necho it is Python 3.8 >&2; exit 1\n",
            "it is Python 3.8: give the path of a Python 3.11",
        ),
    ],
    ids=["without packages", "no interpreter", "no program", "no Python", "old"],
)
def test_python_is_rejected(content, message, flag, folder, capsys):
    python = program(folder, "py", content.encode())
    assert main([*ARGUMENTS, flag, python]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"shardpair: error: {flag} {python}: {message}")
    assert error.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["py"]


def test_missing_framework_is_named(folder, capsys, monkeypatch):
    find = pythons.importlib.util.find_spec
    monkeypatch.setattr(
        pythons.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    assert main(ARGUMENTS) == 3
    error = capsys.readouterr().err
    assert "torchpar: shardpair is not installed there (no torch): install it, or give another" in error
    assert "--torch_python" in error
    assert not list(folder.iterdir())


def test_only_the_run_folder_is_removed(folder):
    own = create_run_dir("mine", "place/mine")
    remove_run_dir(own)
    assert (folder / "place").is_dir()
    assert create_run_dir("demo") != create_run_dir("demo")  # in the same second
