"""What an environment lacks is said in one line that names the flag; nothing is made, and the code is 3."""

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


def test_a_python_that_cannot_run_a_side(folder, capsys):
    for content, says in {
        f'#!/bin/sh\nexec {sys.executable} -S "$@"\n'.encode(): "shardpair is not installed there (no ",
        b"#!/nowhere/python\n": "it cannot be run (No such file or directory)",
        b"\x7fELF" + bytes(100): "it cannot be run (Exec format error)",
        b"#!/bin/sh\nexit 0\n": "it is no Python that can be asked",
        b"#!/bin/sh\necho it is Python 3.8 >&2; exit 1\n": "it is Python 3.8: give the path of a Python 3.11",
    }.items():
        python = program(folder, "py", content)
        for flag in ("--torch_python", "--jax_python"):
            assert main([*ARGUMENTS, flag, python]) == 3
            said = capsys.readouterr().err
            assert said.startswith(f"shardpair: error: {flag} {python}: {says}")
            assert said.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["py"]


def test_this_python_without_a_framework(folder, capsys, monkeypatch):
    find = pythons.importlib.util.find_spec
    monkeypatch.setattr(
        pythons.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    assert main(ARGUMENTS) == 3
    said = capsys.readouterr().err
    assert (
        "torchpar: shardpair is not installed there (no torch): install it, or give another Python with "
        in said
    )
    assert "--torch_python" in said
    assert not list(folder.iterdir())


def test_only_a_run_s_own_folder_is_removed(folder):
    own = create_run_dir("mine", "place/mine")
    remove_run_dir(own)
    assert (folder / "place").is_dir()  # which may have been there
    assert create_run_dir("demo") != create_run_dir("demo")  # two that begin at once
