"""Ledgers of each engine in each layout, number by number: calls, bytes and bytes on the wire.

`compare/judge/snapshot.json` has a row for each collective and axis, purposes added up. A change that sends
something else shows here, and nowhere else if it computes the same. Where the numbers change on purpose,
replace the rows with those that the failed assertion shows, and say why in the commit.
"""

import importlib.metadata
import json
from collections import defaultdict

import pytest

from compare.commands.ledger import Ledger as Study
from compare.contract.ledger import Ledger
from compare.contract.record import LEDGER
from compare.judge.ledger import read_snapshot, snapshot_rows
from compare.judge.outcome import read_outcome
from compare.setup.presets import PRESETS
from compare.spec.engines.registry import STUDIED
from compare.system.json_files import read_json
from tests.support.grid import DEVICES

SNAPSHOT = read_snapshot()
THEIR_OWN_CHOICE = {
    "jax-compiler": "jax",
    "jax-explicit": "jax",
    "torch-library": "torch",
    "torch-compiler": "torch",
}
"""Engines whose collectives another version of a package may choose otherwise, and that package."""

Rows = list[tuple[str, str, int, int, int]]


def recorded(preset: str) -> dict[str, Rows]:
    """Rows (kind, axis, calls, bytes, wire bytes) by engine."""
    rows: dict[str, Rows] = defaultdict(list)
    for name, engine, *numbers in SNAPSHOT.ledgers:
        if name == preset:
            rows[engine].append((*numbers,))
    return rows


@pytest.mark.parametrize("preset", DEVICES)
def test_ledgers_are_those_recorded(preset, grid):
    folder, expected = grid.run(preset), recorded(preset)
    folders = {path.parent.name: path for path in folder.glob(f"*/{LEDGER}")}
    assert folders.keys() == expected.keys()
    found = {engine: snapshot_rows(read_json(path, Ledger).rows) for engine, path in folders.items()}
    for engine, package in THEIR_OWN_CHOICE.items():
        if (
            engine in found
            and importlib.metadata.version(package).split("+")[0] != SNAPSHOT.versions[package]
        ):
            assert {row[1] for row in found.pop(engine)} == {row[1] for row in expected.pop(engine)}
    assert found == expected
    for ledger in Study.findings(read_outcome(folder), folder).value["ledgers"]:
        assert ledger.flows, ledger.case
        assert ledger.unexpected == [], ledger.case


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
    assert (
        {name for name, *_ in SNAPSHOT.ledgers} == SNAPSHOT.layouts.keys() == DEVICES.keys() <= PRESETS.keys()
    )
