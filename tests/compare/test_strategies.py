"""Sweeps in docs/generated/strategies.md: their tables, also where none was run."""

import msgspec
import pytest
from studies import SHOWN, in_lines, study_section
from sweeps import plan_of, swept

from compare.cli import parse
from compare.studies.sweep import Sweep


@pytest.mark.parametrize("name", ["strategies", "strong", "weak"])
def test_every_sweep_of_the_page_is_one(name):
    command, _ = parse(SHOWN[name].split())
    assert isinstance(command, Sweep)


def test_a_stored_sweep_is_a_table_with_its_command(small, tmp_path):
    assert "Not measured yet: `make studies` measures it." in study_section("strong", tmp_path)
    outcome, *_ = swept(plan_of(small, devices=[1, 2], scaling="strong"), tmp_path / "run")
    made = msgspec.structs.replace(outcome.circumstances, git_commit="0" * 40)
    (tmp_path / "strong.json").write_bytes(in_lines(msgspec.structs.replace(outcome, circumstances=made)))
    section = study_section("strong", tmp_path)
    assert f"shardpair {SHOWN['strong']}" in section
    assert "| engine | strategy | devices | batch | efficiency |" in section
    assert "| torch-manual | fsdp | 2 | " in section
    assert "an order of magnitude" in section
    assert "shardpair 000000000000;" in section
