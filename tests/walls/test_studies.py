"""A study is declared in one file: nothing but the registry and Python's API knows it by name."""

import inspect
from pathlib import Path

import pytest
from test_import_walls import files, imports

from compare.cli import COMMANDS, DEFAULT_EXPERIMENT
from compare.commands.overview import overview
from compare.studies.registry import STUDIES

LONGEST = 250
BY_NAME = {"compare/studies/registry.py", "compare/api.py", "compare/studies/resume.py"}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_study_is_one_file_that_only_the_registry_names(study):
    path = Path(inspect.getfile(study))
    assert path.parent.name == "studies"
    assert path.stem == study.word()
    assert len(path.read_text().splitlines()) <= LONGEST
    naming = {
        str(file.relative_to(path.parents[2]))
        for file in files("compare")
        if study.__module__ in imports(file)
    }
    assert naming <= BY_NAME


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_command_line_knows_every_study(study):
    assert COMMANDS[study.word()] is study
    assert DEFAULT_EXPERIMENT[study.word()] == study.default
    assert f"  {study.word():<12} {study.brief}" in overview().splitlines()
    assert "Try:" in (inspect.getdoc(study) or "")
