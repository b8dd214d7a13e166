"""Sweeps in docs/generated/strategies.md: their tables, also where none was run."""

import msgspec
import strategies
import tables
from strategies import SWEEPS
from sweeps import plan_of, swept

from compare.cli import parse
from compare.commands.sweep import Sweep


def test_every_sweep_of_the_page_is_one():
    for name, arguments in SWEEPS.items():
        command, _ = parse(arguments.split())
        assert isinstance(command, Sweep), name


def test_a_stored_sweep_is_a_table_with_its_command(small, tmp_path, monkeypatch):
    monkeypatch.setattr(strategies, "FILE", tmp_path / "strategies.json")
    assert "Not measured yet: `make sweeps` measures it." in tables.sweep("strong")
    outcome, *_ = swept(plan_of(small, devices=[1, 2], scaling="strong"), tmp_path)
    left_out = {"torch-manual.tp.3": "it has two heads"}
    outcome = msgspec.structs.replace(outcome, left_out=left_out, machine="a CPU", git_commit="0" * 40)
    strategies.FILE.write_bytes(msgspec.json.encode({"strong": outcome}))
    section = tables.sweep("strong")
    assert f"shardpair {SWEEPS['strong']}" in section
    assert "| engine | strategy | devices | batch | efficiency |" in section
    assert "| torch-manual | fsdp | 2 | " in section
    assert "an order of magnitude" in section
    assert "Machine: a CPU; " in section
    assert "shardpair 000000000000." in section
    assert "Left out: torch-manual.tp.3: it has two heads." in section


def test_an_unknown_sweep_is_refused(capsys):
    assert strategies.main(["nosuch"]) == 2
    assert "nosuch: no such sweep" in capsys.readouterr().err
