"""Planted mistakes fit the code: each old text occurs once, and each changed file is Python.

`shardpair faults` reads compare/faults.toml, and `make mutations` reads tests/data/mutations.toml. Move a
mistake with its line: edit `file`, `old` and `new` of the entry that the failure names.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from compare.setup.planted import ROOT, Diff, load_faults
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import ExperimentError

FAULTS = load_faults()
MUTATIONS = tomllib.loads((Path(__file__).parents[1] / "data" / "mutations.toml").read_text())["mutation"]


def wrong(name: str, diff: Diff, folder: Path) -> str:
    """The defect of a planted mistake; '' for none. The changed file is left in the folder, which is made."""
    if diff.new == diff.old:
        return f"{name}: {diff.file}: new is old"
    try:
        text = diff.applied(ROOT)
        if diff.file.endswith(".py"):
            ast.parse(text)
            folder.mkdir()
            (folder / Path(diff.file).name).write_text(text)
    except (ExperimentError, SyntaxError) as error:
        return f"{name}: {error}"
    return ""


def undefined_names(folder: Path) -> str:
    """The undefined names that ruff finds in the files of a folder; '' for none."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", "-q"]
    done = subprocess.run(
        [*command, "--output-format", "concise", str(folder)], capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_every_fault_applies(tmp_path):
    errors = [
        wrong(fault.name, diff, tmp_path / f"{fault.name}-{number}")
        for fault in FAULTS.values()
        for number, diff in enumerate(fault.diff)
    ]
    assert not any(errors), "\n".join(filter(None, errors))
    assert not undefined_names(tmp_path)


def test_every_mutation_applies(tmp_path):
    planted = [(m["id"], Diff(file=m["file"], old=m["old"], new=m["new"])) for m in MUTATIONS]
    errors = [wrong(name, diff, tmp_path / name) for name, diff in planted]
    assert not any(errors), "\n".join(filter(None, errors))
    assert not undefined_names(tmp_path)
    assert len({name for name, _ in planted}) == len(planted)
    for mutation in MUTATIONS:
        assert (ROOT / mutation["tests"][0].partition("::")[0]).is_file(), mutation["id"]


def test_every_engine_has_each_fault_or_a_reason():
    for fault in FAULTS.values():
        engines = [name for name in STUDIED if fault.is_planted_in(name)]
        assert engines, fault.name
        assert not set(engines) & set(fault.impossible), fault.name
        assert not fault.impossible or {*engines, *fault.impossible} == set(STUDIED), fault.name
        assert not (fault.edit and fault.diff), fault.name


def test_missing_text_is_an_error():
    diff = Diff(file="compare/faults.toml", old="no such text", new="")
    with pytest.raises(ExperimentError, match=r"compare/faults.toml: .* occurs 0 times, not once"):
        diff.applied(ROOT)
