"""`make inserted`: what each compiler inserts, beside what is written by hand; docs/data/inserted.json.

    python docs/inserted.py float64.tp bfloat16.fsdp        # some of them; the others stay as they are

Every engine that can trains four steps of `check` under a layout, and the third is watched (`shardpair
ledger`). Kept is a row for each kind, axis and purpose that any of them sends: bytes and calls of a device,
dtype and phase, the closed form, and the name of the pattern where the bytes are others.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.communication import Communication
from compare.contract.record import read_record
from compare.judge.ledger_lines import Line
from compare.show.markdown import markdown_rows as markdown
from compare.spec.engines.registry import STUDIED
from compare.studies.ledgers import read_ledgers
from compare.studies.presets import PRESETS

KEPT = Path(__file__).parent / "data" / "inserted.json"
LAYOUTS = {
    "float64": ("ddp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp", "pp_gpipe"),
    "bfloat16": ("ddp", "fsdp", "tp"),
}
"""Presets by dtype."""
HLO_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "s32": "int32"}
ENGINES = [
    name for sent_by_hand in (False, True) for name, e in STUDIED.items() if (not e.sends_by) is sent_by_hand
]
"""Columns: those that are told first, then those that are written by hand."""
NONE = "\N{EN DASH}"

Key = tuple[str, str, str]


class Inserted(Struct, frozen=True, kw_only=True):
    """What one engine sends of one kind, along one axis, for one purpose, on its busiest stage."""

    dtype: str
    """Of the run."""
    layout: str
    engine: str
    key: Key
    """Kind, axis, purpose."""
    expected: int
    """Bytes of the closed form; 0 if there should be none."""
    bytes: int
    """Logical ones of a device in a step."""
    calls: int
    sent_in: list[str]
    """The dtypes that travel."""
    phases: list[str]
    why: str
    """The pattern that gives the bytes; "unexplained" if none does; empty for the closed form's."""


def rows_of(dtype: str, layout: str, folder: Path) -> list[Inserted]:
    """The rows of a finished run of `shardpair ledger` under one layout. Raises RecordError."""
    found = []
    for ledger in read_ledgers(folder).ledgers:
        rows = read_record(folder / ledger.case).ledger.rows
        busiest: dict[Key, Line] = {}
        for line in sorted(ledger.lines, key=lambda line: (line.found, line.expected)):
            busiest[line.kind, line.axis, line.purpose] = line
        for key, line in busiest.items():
            own = [row for row in rows if (row.kind, row.axis, row.purpose) == key]
            found.append(
                Inserted(
                    dtype=dtype,
                    layout=layout,
                    engine=ledger.engine,
                    key=key,
                    expected=round(line.expected),
                    bytes=line.found,
                    calls=line.calls,
                    sent_in=sorted({HLO_DTYPES.get(row.dtype, row.dtype) for row in own}),
                    phases=_phases(own),
                    why=line.why or ("" if line.is_explained else "unexplained"),
                )
            )
    return found


def _phases(rows: Iterable[Communication]) -> list[str]:
    seen = {row.phase for row in rows}
    return [phase for phase in ("forward", "backward", "update") if phase in seen]


def read_inserted() -> list[Inserted]:
    """What is kept; nothing before the first `make inserted`."""
    return msgspec.json.decode(KEPT.read_bytes(), type=list[Inserted]) if KEPT.is_file() else []


def section(dtype: str) -> str:
    """A table for each layout: the closed form, then a column for each engine."""
    parts = []
    for layout in LAYOUTS[dtype]:
        if rows := [row for row in read_inserted() if (row.dtype, row.layout) == (dtype, layout)]:
            parts += [f"**`{layout}`**: {PRESETS[layout].description}", _table(rows)]
    return "\n\n".join(parts)


def _table(rows: Sequence[Inserted]) -> str:
    engines = [name for name in ENGINES if any(row.engine == name for row in rows)]
    largest: dict[Key, int] = {}
    for row in rows:
        largest[row.key] = max(largest.get(row.key, 0), row.bytes, row.expected)
    cells = []
    for key in sorted(largest, key=lambda key: (-largest[key], key)):
        of_key = {row.engine: row for row in rows if row.key == key}
        closed = " / ".join(
            dict.fromkeys(f"{row.expected:,}" if row.expected else NONE for row in of_key.values())
        )
        kind, axis, purpose = key
        cells.append(
            (f"{kind} over {axis}, {purpose}", closed, *(_cell(of_key.get(name)) for name in engines))
        )
    return markdown(
        ["what, along which axis, for what", "closed form", *(f"`{name}`" for name in engines)], cells
    )


def _cell(row: Inserted | None) -> str:
    """Bytes in calls, when, and in which dtype if it is not the run's."""
    if row is None or not (row.bytes or row.why):
        return NONE
    if not row.bytes:
        return f"nothing: {row.why}"
    other = [dtype for dtype in row.sent_in if dtype != row.dtype]
    words = f"{row.bytes:,} in {row.calls:,}, {' and '.join(row.phases)}"
    if other:
        words += f", {' and '.join(row.sent_in)}"
    return f"{words}: {row.why}" if row.why else words


def main(names: Sequence[str]) -> int:
    """Run these, or all, and keep what they sent. Returns the exit code."""
    known = [f"{dtype}.{layout}" for dtype, layouts in LAYOUTS.items() for layout in layouts]
    if unknown := [name for name in names if name not in known]:
        print(f"{unknown[0]}: no such run (there are {', '.join(known)})", file=sys.stderr)
        return 2
    for name in names or known:
        dtype, layout = name.split(".")
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / layout
            command = ["ledger", "check", "--presets", layout, "--precision.dtype", dtype, "--quiet"]
            done = subprocess.run(
                [sys.executable, "-m", "compare", *command, "--run_dir", str(folder)],
                stdout=subprocess.DEVNULL,
                check=False,
            )
            if done.returncode:
                return done.returncode
            rows = rows_of(dtype, layout, folder)
        others = [row for row in read_inserted() if (row.dtype, row.layout) != (dtype, layout)]
        written = KEPT.with_suffix(".tmp")
        lines = ",\n".join(msgspec.json.encode(row).decode() for row in (*others, *rows))
        written.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        written.rename(KEPT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
