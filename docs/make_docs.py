"""`make docs`: write docs/generated/tables.md, support.md and envelope.schema.json from the code."""

import json
from pathlib import Path

import msgspec
import support

from compare.commands.faults import FAULTS
from compare.judge.rungs import RUNGS, Limits, Rung
from compare.numerics.parameters import parameter_count
from compare.setup.planted import Fault
from compare.setup.presets import PRESETS, preset_layout
from compare.show.envelope import Envelope
from compare.spec.engines.engine import PEER_DTYPES
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import Layout, load, named_experiments

GENERATED = Path(__file__).parent / "generated"


def tables() -> dict[str, list[dict[str, object]]]:
    """Rows by the title of their table: cells, which hold no vertical bar, by their column's header."""
    return {
        "Experiments": [
            {
                "experiment": f"`{name}`",
                "parameters": f"{parameter_count(of.model):,}",
                "steps": of.train.max_iters,
                "dtype": of.precision.dtype,
            }
            for name, of in ((name, load(name)) for name in named_experiments())
        ],
        "Presets": [
            {"preset": f"`{name}`", "description": of.description, "layout": _fields(name)}
            for name, of in PRESETS.items()
        ],
        "Engines": [
            {
                "engine": f"`{name}`",
                "gradient synchronisation": ", ".join(of.gradient_sync),
                "pipeline schedules": ", ".join(of.layouts.schedules),
            }
            for name, of in STUDIED.items()
        ],
        "Peers": [
            {"peer": f"`{name}`", "description": of.decides, "dtypes": ", ".join(PEER_DTYPES)}
            for name, of in PEERS.items()
        ],
        "Tolerances": [
            {"rung": rung.name, **{dtype: _limit(rung, dtype) for dtype in Limits._fields}}
            for rung in RUNGS
            if rung.absent
        ],
        "Planted faults": [
            {
                "planted fault": f"`{name}`",
                "mistake": of.mistake,
                "caught at": of.rung,
                "engines": _able(of),
            }
            for name, of in FAULTS.items()
        ],
    }


def _fields(preset: str) -> str:
    """Layout fields that a preset changes, on the number of devices of `check --presets all`."""
    plain = msgspec.structs.asdict(Layout())
    layout = msgspec.structs.asdict(preset_layout(Layout(), preset, PRESETS[preset].devices))
    fields = ", ".join(f"{key}={value}" for key, value in layout.items() if value != plain[key])
    return f"`{fields}`" if fields else ""


def _limit(rung: Rung, dtype: str) -> str:
    steps = rung.first_steps.get(dtype)
    return f"{getattr(rung.limits, dtype):g}" + (f", {steps} steps" if steps else "")


def _able(fault: Fault) -> str:
    """The engines that can make a mistake, in short."""
    unable = [name for name in STUDIED if not fault.is_planted_in(name)]
    if len(unable) < 3:
        return f"all but {' and '.join(unable)}" if unable else "all"
    return ", ".join(name for name in STUDIED if name not in unable)


def tables_page() -> str:
    """The page docs/generated/tables.md."""
    parts = ["# Tables from the code\n\n`make docs` writes this page.\n"]
    for title, rows in tables().items():
        lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
        table = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
        parts.append(f"## {title}\n\n{table}\n")
    return "\n".join(parts)


def schema_page() -> str:
    """The JSON Schema of the object that --json prints."""
    return json.dumps(msgspec.json.schema(Envelope), indent=2) + "\n"


PAGES = {
    GENERATED / "tables.md": tables_page,
    GENERATED / "support.md": support.page,
    GENERATED / "envelope.schema.json": schema_page,
}
"""Functions that return a page, by the page's path."""

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
