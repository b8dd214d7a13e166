"""Ledgers of each engine in each layout, number by number: calls, bytes and bytes on the wire.

`ledger_numbers.json` has a row for each collective and axis, purposes added up. A change that sends something
else shows here, and nowhere else if it computes the same. Where the numbers change on purpose, replace the
rows with those that the failed assertion shows, and say why in the commit.
"""

import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path

import pytest
from grid import DEVICES

from compare.contract.communication import Communication, summed
from compare.contract.ledger import Ledger
from compare.contract.record import LEDGER
from compare.host.json_files import read_json
from compare.spec.engines.registry import STUDIED
from compare.studies.ledgers import read_ledgers
from compare.studies.presets import PRESETS

NUMBERS = json.loads(Path(__file__).with_suffix(".json").with_stem("ledger_numbers").read_text())
THEIR_OWN_CHOICE = {
    "jax-compiler": "jax",
    "jax-explicit": "jax",
    "torch-library": "torch",
    "torch-compiler": "torch",
}
"""Engines whose collectives another version of a package may choose otherwise, and that package."""

Rows = list[list[str | int]]


def recorded(preset: str) -> dict[str, Rows]:
    """Rows (kind, axis, calls, bytes, wire bytes) by engine."""
    rows: dict[str, Rows] = defaultdict(list)
    for name, engine, *numbers in NUMBERS["ledgers"]:
        if name == preset:
            rows[engine].append(numbers)
    return rows


def rows_of(ledger: list[Communication]) -> Rows:
    """The same rows of a ledger."""
    rows: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for entry in summed(ledger):
        row = rows[entry.kind, entry.axis]
        row[:] = [row[0] + entry.calls, row[1] + entry.bytes, row[2] + entry.wire_bytes]
    return [[*key, *row] for key, row in sorted(rows.items())]


@pytest.mark.parametrize("preset", DEVICES)
def test_ledgers_are_those_recorded(preset, grid):
    folder, expected = grid.run(preset), recorded(preset)
    folders = {path.parent.name: path for path in folder.glob(f"*/{LEDGER}")}
    assert folders.keys() == expected.keys()
    found = {engine: rows_of(read_json(path, Ledger).rows) for engine, path in folders.items()}
    for engine, package in THEIR_OWN_CHOICE.items():
        if engine in found and importlib.metadata.version(package) != NUMBERS["versions"][package]:
            assert {row[1] for row in found.pop(engine)} == {row[1] for row in expected.pop(engine)}
    assert found == expected
    _stand_beside_the_closed_form(folder)


def _stand_beside_the_closed_form(folder: Path) -> None:
    """The manual engines' ledgers are the closed form's to the byte, the others' are explained."""
    for ledger in read_ledgers(folder).ledgers:
        assert ledger.problems == [], ledger.case
        assert ledger.lines, ledger.case
        assert ledger.unexplained == [], ledger.case
        if ledger.engine.endswith("-manual"):
            assert {line.state for line in ledger.lines} == {"expected"}, ledger.case


def test_the_step_that_is_watched_is_a_zero_bubble_schedule_too(shardpair):
    """PyTorch's splits backward in two; what follows modules in the watched step must leave that alone."""
    flags = ("--preset", "pp_zero_bubble", "--devices", "2", "--model.n_layer", "2", "--fail_on_unexpected")
    done = shardpair("ledger", "check", *flags, "--run_dir", "run", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    study = json.loads(done.stdout)
    assert [ledger["engine"] for ledger in study["ledgers"]] == ["torch-manual", "torch-library"]
    assert study["left_out"].keys() == STUDIED.keys() - {"torch-manual", "torch-library"}
    assert study["missing"] == {}


def test_every_strategy_has_numbers():
    assert {name for name, *_ in NUMBERS["ledgers"]} == DEVICES.keys() <= PRESETS.keys()
