"""Planted mistakes fit the code: each old text occurs once, and each changed file is Python.

`shardpair faults` reads compare/faults.toml, and `make mutations` reads tests/data/mutations.toml. Move a
mistake with its line: edit `file`, `old` and `new` of the entry that the failure names.
"""

import ast
import tomllib
from pathlib import Path

import pytest

from compare.setup.planted import ROOT, Diff, load_faults
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import ExperimentError

FAULTS = load_faults()
MUTATIONS = tomllib.loads((Path(__file__).parents[1] / "data" / "mutations.toml").read_text())["mutation"]


def wrong(name: str, diff: Diff) -> str:
    """The defect of a planted mistake; '' for none."""
    if diff.new == diff.old:
        return f"{name}: {diff.file}: new is old"
    try:
        text = diff.applied(ROOT)
        if diff.file.endswith(".py"):
            ast.parse(text)
    except (ExperimentError, SyntaxError) as error:
        return f"{name}: {error}"
    return ""


def test_every_fault_applies():
    errors = [wrong(fault.name, diff) for fault in FAULTS.values() for diff in fault.diff]
    assert not any(errors), "\n".join(filter(None, errors))


def test_every_mutation_applies():
    planted = [(m["id"], Diff(file=m["file"], old=m["old"], new=m["new"])) for m in MUTATIONS]
    errors = [wrong(name, diff) for name, diff in planted]
    assert not any(errors), "\n".join(filter(None, errors))
    assert len({name for name, _ in planted}) == len(planted)


@pytest.mark.parametrize("engine", STUDIED)
def test_every_engine_has_each_fault_or_a_reason(engine):
    for fault in FAULTS.values():
        ways = bool(fault.edit), bool(fault.diffs(engine)), engine in fault.impossible
        assert sum(ways) == 1, (fault.name, ways)


def test_a_missing_text_is_an_error_with_file_and_count():
    diff = Diff(file="compare/faults.toml", old="no such text", new="")
    with pytest.raises(ExperimentError, match=r"compare/faults.toml: .* occurs 0 times, not once"):
        diff.applied(ROOT)
