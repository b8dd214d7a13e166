"""Tables of docs/performance.md and docs/generated/performance.md, from the benches in docs/data."""

import re
from collections.abc import Mapping
from statistics import median

from performance import BENCHES, NOT_YET, Kept, read_benches

from compare.judge.statistics import interval_words
from compare.show.findings import written
from compare.show.markdown import markdown_rows as markdown
from compare.show.markdown import markdown_table

COLUMNS = {
    "`torch-manual` / `torch-library`": (
        "torch-manual",
        ("torch-2", "torch-2-tensor", "torch-2-pipeline", "torch-4"),
    ),
    "`torch-manual` / `deepspeed`": ("torch-manual", ("deepspeed",)),
    "`jax-compiler` / one device": ("jax-compiler", ("jax-4", "jax-4-tensor")),
    "`jax-manual` / one device": ("jax-manual", ("jax-4", "jax-4-tensor", "jax-4-pipeline")),
}
"""Columns of the summary: the engine and its benches; the baseline stands behind the stroke."""
TOLD_COLUMNS = {
    "`torch-library` / `torch-compiler`": ("torch-library", ("compilers-torch",)),
    "`torch-manual` / `torch-compiler`": ("torch-manual", ("compilers-torch",)),
    "`jax-compiler` / `jax-explicit`": ("jax-compiler", ("compilers-jax",)),
    "`jax-manual` / `jax-explicit`": ("jax-manual", ("compilers-jax",)),
}
"""Those of docs/compilers.md."""


def summary(columns: Mapping[str, tuple[str, tuple[str, ...]]] = COLUMNS) -> str:
    """Wall time of each engine over its baseline, a row for each layout and number of devices."""
    stored = read_benches()
    cells: dict[str, dict[str, str]] = {}
    for column, (engine, benches) in columns.items():
        for bench in benches:
            for layout, text in _ratios(stored.get(bench), engine).items():
                cells.setdefault(layout, {}).setdefault(column, text)
    if not cells:
        return NOT_YET
    rows = (
        [f"`{layout}`", devices, *(cells[f"{layout}-{devices}"].get(column, "") for column in columns)]
        for layout, _, devices in (name.rpartition("-") for name in sorted(cells, key=_devices))
        if layout
    )
    return markdown(["layout", "devices", *columns], rows)


def one_device() -> str:
    """Wall time of every engine on one device over that of nanoGPT's loop, in a sentence."""
    stored = read_benches().get("single")
    if stored is None:
        return NOT_YET
    each = (f"{case.rpartition('.')[0]} {written(one.wall, '.2f')}" for case, one in stored.ratios.items())
    return f"On one device, over nanoGPT's own loop: {', '.join(each)}."


def _ratios(stored: Kept | None, engine: str) -> dict[str, str]:
    """`0.97 [0.90, 1.06]` of an engine, by layout and devices: `fsdp-2`."""
    cases = (stored.ratios if stored else {}).items()
    of_engine = ((case.rpartition("."), one) for case, one in cases)
    return {
        re.sub(r"(?<=[a-z])(?=\d+$)", "-", block): written(one.wall, ".2f")
        for (name, _, block), one in of_engine
        if name == engine
    }


def _devices(name: str) -> int:
    return int(re.findall(r"\d+", name)[-1]) if "-" in name else 1


def performance(name: str) -> str:
    """A bench's tables, its command, and what holds for it alone; or that it was not run yet."""
    stored = read_benches().get(name)
    command = f"```sh\nshardpair {BENCHES[name]}\n```"
    if stored is None:
        return f"{command}\n\n{NOT_YET}"
    parts = [command]
    for table in stored.tables:
        told = table.below.partition(":")[0]
        parts += [markdown_table(table), *([f"{told}."] if told else [])]
    words = [*_own_sentences(stored), *(f"**{line}**" for line in stored.warnings)]
    words += [f"Left out: {case}: {why}." for case, why in stored.left_out.items()]
    if stored.command != f"shardpair {BENCHES[name]}":
        words.append(f"**Measured with another command: `{stored.command}`.**")
    return "\n\n".join([*parts, " ".join(words)])


def method() -> str:
    """How the benches were timed, said once for all that were timed alike."""
    alike: dict[str, dict[str, list[str]]] = {}
    for name, stored in read_benches().items():
        timed, ratios, *_ = stored.about
        before, windows, after = re.split(r"(\d+ windows? of \d+ steps)", timed, maxsplit=1)
        said = f"{before}{{windows}}{after} Ratios are taken {ratios[ratios.index('within a round') :]}"
        alike.setdefault(said, {}).setdefault(windows, []).append(name)
    return "\n\n".join(said.format(windows=_windows(of)) for said, of in alike.items()) or NOT_YET


def _windows(benches: dict[str, list[str]]) -> str:
    """`3 windows of 10 steps`; if benches differ, each length with the benches that have it."""
    if len(benches) == 1:
        return next(iter(benches))
    return " or ".join(f"{windows} ({', '.join(names)})" for windows, names in benches.items())


def _own_sentences(stored: Kept) -> list[str]:
    """What is said of this bench, less what `method` says of all: baseline, ceiling, machine."""
    _, ratios, ceiling, *others = stored.about
    own = ceiling.partition("computed anew. ")[2].replace("Their ceiling", "The ceiling of GFLOP/s")
    return [f"{ratios.partition(', within a round; ')[0]}.", *filter(None, [own]), *others]


def agreement() -> str:
    """Whether two benches of the same commit tell the same: how many of their intervals overlap."""
    once, again = (read_benches().get(name) for name in ("torch-2-tensor", "torch-2-tensor-again"))
    if once is None or again is None:
        return NOT_YET
    of_rows = [
        (f"{case}, {figure}", getattr(once.ratios[case], figure), getattr(again.ratios[case], figure))
        for case in sorted(once.ratios.keys() & again.ratios.keys())
        for figure in ("wall", "cpu")
    ]
    apart = [name for name, one, other in of_rows if not one.overlaps(other)]
    source = f"Both of {once.git_commit[:12]}"
    if once.git_commit != again.git_commit:
        source = f"Of {once.git_commit[:12]} and {again.git_commit[:12]}"
    return f"{source}: {len(of_rows) - len(apart)} of {len(of_rows)} intervals overlap" + (
        f"; apart are {', '.join(apart)}." if apart else "."
    )


def resolution() -> str:
    """How wide the stored intervals are, and what difference the median one of them could have told."""
    ratios = [one for stored in read_benches().values() for one in stored.ratios.values()]
    found = [one for pair in ratios for one in (pair.wall, pair.cpu) if one.has_interval]
    ends = [ends for one in found if (ends := one.told_apart())]
    if not ends:
        return NOT_YET
    below, above = (median(end[side] for end in ends) for side in (0, 1))
    # In units of the median, an interval [low, high] is [1 / above, 1 / below].
    width = median(1 / low - 1 / high for low, high in ends)
    return (
        f"The {len(found)} ratios have {interval_words(found)}, whose median width is {width:.0%}. "
        f"One of that width tells a time below {below:.2f} or above {above:.2f} from 1.00 every second time, "
        f"and one twice as far off nineteen times in twenty; what is closer is mostly missed."
    )
