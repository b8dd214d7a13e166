"""Ledgers of each engine in each layout, number by number: calls, bytes and bytes on the wire.

`tests/data/snapshot.json` has a row for each collective and axis, purposes added up. A change of bytes that
changes no result shows only here. If the numbers change on purpose, replace the rows with the rows of the
failed assertion, and give the reason in the commit.
"""

import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from compare.commands.ledger import Ledger as Study
from compare.contract.communication import summed
from compare.contract.ledger import Ledger
from compare.contract.record import LEDGER
from compare.judge.outcome import read_outcome
from compare.setup.presets import PRESETS
from compare.spec.engines.registry import STUDIED
from compare.system.json_files import read_json
from tests.support.grid import DEVICES


class Snapshot(Struct, frozen=True):
    """Bytes that every engine sent in a step under some presets."""

    versions: dict[str, str]
    """Versions of the frameworks, by package."""
    experiment: dict[str, dict[str, int | float]]
    """Fields in which the experiment differs from `check`."""
    layouts: dict[str, dict[str, int | str | bool]]
    """Fields of each preset's layout."""
    ledgers: list[tuple[str, str, str, str, int, int, int]]
    """Preset, engine, kind, axis, calls, bytes, bytes on the wire."""


SNAPSHOT = msgspec.json.decode(
    (Path(__file__).parents[1] / "data" / "snapshot.json").read_bytes(), type=Snapshot
)
THEIR_OWN_CHOICE = {
    "jax-compiler": "jax",
    "jax-explicit": "jax",
    "torch-library": "torch",
    "torch-compiler": "torch",
}
"""Engines whose collectives another version of a package may choose otherwise, and that package."""

Rows = list[tuple[str, str, int, int, int]]


def rows_of(ledger: Ledger) -> Rows:
    """A ledger as the snapshot has it, purposes added up."""
    sums: dict[tuple[str, str], tuple[int, int, int]] = {}
    for row in summed(ledger.rows):
        calls, size, wire = sums.get((row.kind, row.axis), (0, 0, 0))
        sums[row.kind, row.axis] = calls + row.calls, size + row.bytes, wire + row.wire_bytes
    return [(kind, axis, *total) for (kind, axis), total in sorted(sums.items())]


def recorded(preset: str) -> dict[str, Rows]:
    """Rows (kind, axis, calls, bytes, wire bytes) by engine."""
    rows: dict[str, Rows] = defaultdict(list)
    for name, engine, *numbers in SNAPSHOT.ledgers:
        if name == preset:
            rows[engine].append((*numbers,))
    return rows


@pytest.mark.parametrize("preset", reversed(DEVICES))  # test_evaluation.py begins at the other end
def test_ledgers_are_those_recorded(preset, grid):
    folder, expected = grid.run(preset), recorded(preset)
    folders = {path.parent.name: path for path in folder.glob(f"*/{LEDGER}")}
    assert folders.keys() == expected.keys()
    found = {engine: rows_of(read_json(path, Ledger)) for engine, path in folders.items()}
    for engine, package in THEIR_OWN_CHOICE.items():
        if (
            engine in found
            and importlib.metadata.version(package).split("+")[0] != SNAPSHOT.versions[package]
        ):
            assert {row[1] for row in found.pop(engine)} == {row[1] for row in expected.pop(engine)}
    assert found == expected
    for ledger in Study.findings(read_outcome(folder), folder).values["ledgers"]:
        assert ledger.flows, ledger.case
        assert ledger.unexpected == [], ledger.case


def test_watched_step_keeps_zero_bubble(shardpair):
    """PyTorch's splits backward in two; what follows modules in the watched step must leave that alone."""
    flags = ("--preset", "pp_zero_bubble", "--devices", "2", "--model.n_layer", "2", "--fail_on_unexpected")
    done = shardpair("ledger", "check", *flags, "--run_dir", "run", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    study = json.loads(done.stdout)
    assert [ledger["engine"] for ledger in study["values"]["ledgers"]] == ["torch-manual", "torch-library"]
    assert study["left_out"].keys() == STUDIED.keys() - {"torch-manual", "torch-library"}
    assert study["missing"] == {}


def test_every_strategy_has_numbers():
    assert (
        {name for name, *_ in SNAPSHOT.ledgers} == SNAPSHOT.layouts.keys() == DEVICES.keys() <= PRESETS.keys()
    )
