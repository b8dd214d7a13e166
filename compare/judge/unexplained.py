"""Differences from the closed form that nothing explains, as they were seen: `unexplained.json`.

A difference is known again by its engine, its layout and its bytes, expected and found. At other sizes, or
where another version of a framework sends something else, it is new, and `shardpair ledger
--fail_on_unexpected` fails. A new one gets a pattern in `judge.known_deviations`, if a mechanism gives its
bytes, else a row in the file, with the version.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from compare.spec.experiment import Layout

FILE = Path(__file__).with_suffix(".json")


class SeenRow(NamedTuple):
    """Logical bytes of a device in a step."""

    kind: str
    axis: str
    purpose: str
    expected: int
    found: int


class Seen(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine sent otherwise under one layout."""

    engine: str
    version: str
    """Of the framework: `jax 0.10.2`."""
    layout: dict[str, int | bool | str]
    """Fields of the layout by name; all others are at liberty."""
    rows: frozenset[SeenRow]

    def is_of(self, engine: str, layout: Layout) -> bool:
        """True if it was seen of this engine under this layout."""
        return engine == self.engine and all(getattr(layout, key) == to for key, to in self.layout.items())


@functools.cache
def read_seen() -> list[Seen]:
    """All that was seen. Raises msgspec.DecodeError for a row that is not as it should be."""
    return msgspec.json.decode(FILE.read_bytes(), type=list[Seen])


def seen(
    engine: str,
    layout: Layout,
    *,
    expected: Mapping[tuple[str, str, str], float],
    found: Mapping[tuple[str, str, str], int],
) -> dict[tuple[str, str, str], str]:
    """The version in which each difference was seen before, by (kind, axis, purpose); new ones are left out.

    Args:
        engine: a name in ENGINES.
        layout: it was run under.
        expected, found: logical bytes by (kind, axis, purpose), on one rank of the pipeline.
    """
    known = {row: one.version for one in read_seen() if one.is_of(engine, layout) for row in one.rows}
    keys = dict.fromkeys((*expected, *found))
    rows = {key: SeenRow(*key, round(expected.get(key, 0.0)), found.get(key, 0)) for key in keys}
    return {key: known[row] for key, row in rows.items() if row in known}
