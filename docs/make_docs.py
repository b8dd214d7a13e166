"""`make docs`: write docs/generated/tables.md from the code. With --check nothing is written.

The exit code of --check is 1 if the page is stale. No other page repeats these tables: prose links to them.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from compare.judge.ladder import LADDER
from compare.judge.rungs import SOME
from compare.judge.tolerances import TOLERANCES, Tolerance
from compare.numerics.parameters import parameter_count
from compare.spec.engines.registry import PEERS, STUDIED
from compare.spec.experiment import Layout, load, named_experiments
from compare.studies.faults import FAULTS
from compare.studies.presets import PRESETS, preset_layout

PAGE = Path(__file__).parent / "generated" / "tables.md"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; cells may hold no vertical bar."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def experiments() -> str:
    """The experiments that ship."""
    rows = []
    for name in named_experiments():
        experiment = load(name)
        size = f"{parameter_count(experiment.model):,}"
        rows.append((f"`{name}`", size, experiment.train.max_iters, experiment.precision.dtype))
    return markdown(["experiment", "parameters", "steps", "dtype"], rows)


def presets() -> str:
    """Layouts by name, and the fields that each sets on the devices that `check --presets all` takes."""
    plain = msgspec.structs.asdict(Layout())
    rows = []
    for name, preset in PRESETS.items():
        layout = msgspec.structs.asdict(preset_layout(Layout(), name, preset.devices))
        fields = ", ".join(f"{key}={value}" for key, value in layout.items() if value != plain[key])
        rows.append((f"`{name}`", preset.description, f"`{fields}`" if fields else ""))
    return markdown(["preset", "description", "layout"], rows)


def engines() -> str:
    """What each engine offers."""
    rows = [
        (f"`{engine.name}`", ", ".join(engine.gradient_sync), ", ".join(engine.layouts.schedules))
        for engine in STUDIED.values()
    ]
    return markdown(["engine", "gradient synchronisation", "pipeline schedules"], rows)


def peers() -> str:
    """What others use, to be run beside the engines."""
    rows = [(f"`{peer.name}`", peer.decides, ", ".join(peer.dtypes)) for peer in PEERS.values()]
    return markdown(["peer", "description", "dtypes"], rows)


def tolerances() -> str:
    """The limit of every rung, by dtype."""

    def limit(tolerance: Tolerance) -> str:
        return f"{tolerance.limit:g}" + (f", {tolerance.steps} steps" if tolerance.steps else "")

    rungs = [rung for rung in LADDER if rung not in SOME]
    rows = ([rung, *(limit(TOLERANCES[dtype][rung]) for dtype in TOLERANCES)] for rung in rungs)
    return markdown(["rung", *TOLERANCES], rows)


def faults() -> str:
    """Every planted fault, and the rung that catches it."""
    rows = []
    for fault in FAULTS.values():
        able = [name for name, engine in STUDIED.items() if fault.name not in engine.impossible_faults]
        among = "all" if len(able) == len(STUDIED) else ", ".join(able)
        rows.append((f"`{fault.name}`", fault.description, fault.rung, among))
    return markdown(["planted fault", "mistake", "caught at", "engines"], rows)


SECTIONS = {
    "Experiments": experiments,
    "Presets": presets,
    "Engines": engines,
    "Peers": peers,
    "Tolerances": tolerances,
    "Planted faults": faults,
}


def page() -> str:
    """The whole page."""
    parts = [f"## {title}\n\n{section()}\n" for title, section in SECTIONS.items()]
    return "\n".join(["# Tables from the code\n\n`make docs` writes this page.\n", *parts])


def main() -> int:
    """Write the page, or say that it is stale. Returns the exit code."""
    is_stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page()
    if is_stale and "--check" in sys.argv[1:]:
        print("docs/generated/tables.md is stale: run make docs", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
