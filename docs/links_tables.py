"""Tables and picture of docs/links.md: steps over a slow link beside time = latency + bytes / bandwidth.

    exposed    t + b / w        all bytes are waited for
    hidden     max(t, b / w)    all of them go while the devices compute

t is the step without a cap, with the latency of every message in it; b the ledger's bytes in one direction
(two hosts send as much each); w the bandwidth of one stream at the cap, as it was measured.
"""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from links import AtRate, Link, LinkRow, Links, read_links

from compare.show.figures import save_figures
from compare.show.findings import Figure, Row, Series, Table, Text
from compare.show.markdown import markdown_table

PICTURE = Path(__file__).parent / "links.png"
SHOWN = (
    f"![Time of a step over the bandwidth of the link, for two and for four devices on two hosts, measured "
    f"and by the formula]({PICTURE.name})"
)
NOT_YET = "Not measured yet: `make links` measures it."
ON_TWO, ON_FOUR = ("ddp bucketed", "1f1b", "gpipe"), ("fsdp 4", "hsdp 2 x 2", "tp 4", "dp 2 x tp 2")
NEAR = 0.1
"""Of the step: so far from a bound is still at it."""


def exposed_ms(row: LinkRow, link: Link) -> float:
    """Milliseconds of a step in which all that crosses hosts is waited for."""
    return row.rates[0].step_ms + on_link_ms(row, link)


def hidden_ms(row: LinkRow, link: Link) -> float:
    """Milliseconds of a step in which nothing is waited for, if the devices compute for so long."""
    return max(row.rates[0].step_ms, on_link_ms(row, link))


def on_link_ms(row: LinkRow, link: Link) -> float:
    """Milliseconds that the bytes of one direction take."""
    return row.crossing_bytes / 2 / link.bytes_per_s * 1000


def links_section() -> str:
    """What the link was, every case at every cap, and how far the formulas are off."""
    found = read_links()
    if not found:
        return NOT_YET
    tables = map(markdown_table, (link_table(found), step_table(found)))
    return "\n\n".join([where(found), SHOWN, *tables, errors(found), choices(found)])


def where(found: Links) -> str:
    """The machine."""
    machine = found.circumstances.machine
    return (
        f"Measured on {found.circumstances.created_utc[:10]} on {machine.cores} cores ({machine.cpu_model}), "
        f"which all processes of both hosts share; {len(found.rows)} runs."
    )


def link_table(found: Links) -> Table:
    """The link as a program sees it."""
    rows = [
        Row(
            Text(_cap(link.gbit)),
            [Text(f"{link.bytes_per_s * 8 / 1e9:.2f}"), Text(f"{link.latency_s * 1e6:.0f}")],
        )
        for link in found.links
    ]
    return Table(name="The link", corner="cap", columns=["one stream, gbit/s", "latency, us"], rows=rows)


def step_table(found: Links) -> Table:
    """Milliseconds of a step, with what the two bounds give below each cap."""
    caps = found.links[1:]
    rows = []
    for row in found.rows:
        cells = [
            Text(f"{row.crossing_bytes / 2e6:.2f}"),
            Text(f"{row.sent_bytes / 2e6:.2f}"),
            Text(f"{row.rates[0].step_ms:.0f}"),
        ]
        for link in caps:
            bounds = f"({hidden_ms(row, link):.0f} to {exposed_ms(row, link):.0f})"
            cells.append(Text(f"{at(row, link).step_ms:.0f} {bounds}"))
        rows.append(Row(Text(row.name), cells))
    columns = ["MB each way, ledger", "MB each way, interface", "ms, no cap"]
    columns += [f"ms at {_cap(link.gbit)} (hidden to exposed)" for link in caps]
    return Table(name="Steps over a capped link", corner="strategy and engine", columns=columns, rows=rows)


def at(row: LinkRow, link: Link) -> AtRate:
    """A case's steps at a cap."""
    return next(one for one in row.rates if one.gbit == link.gbit)


def errors(found: Links) -> str:
    """How far the exposed time is off, per cap, and whose."""
    lines = []
    for link in found.links[1:]:
        off = {row.name: at(row, link).step_ms / exposed_ms(row, link) - 1 for row in found.rows}
        worst, usual = max(off, key=lambda name: abs(off[name])), statistics.median(map(abs, off.values()))
        between = sum(_is_between(row, link) for row in found.rows)
        lines.append(
            f"- {_cap(link.gbit)}: median distance from `exposed` {usual:.0%}; the furthest is {worst} "
            f"({off[worst]:+.0%}); {between} of {len(found.rows)} lie between the bounds, or within "
            f"{NEAR:.0%} of one"
        )
    return "\n".join(lines)


def _is_between(row: LinkRow, link: Link) -> bool:
    low, high = hidden_ms(row, link) * (1 - NEAR), exposed_ms(row, link) * (1 + NEAR)
    return low <= at(row, link).step_ms <= high


def choices(found: Links) -> str:
    """On four devices, the fastest layout of each engine at each cap, and which one the formula names."""
    lines = []
    for engine, rows in _by_engine(found.rows, ON_FOUR):
        for link in found.links[1:]:
            fastest = min(rows, key=lambda row: at(row, link).step_ms)
            formula = min(rows, key=lambda row: exposed_ms(row, link))
            same = "as the formula has it" if formula is fastest else f"the formula names {formula.case}"
            lines.append(f"- {engine} at {_cap(link.gbit)}: {fastest.case} is the fastest, {same}")
    return "\n".join(lines)


def _by_engine(rows: Sequence[LinkRow], cases: Sequence[str]) -> Iterator[tuple[str, list[LinkRow]]]:
    for engine in dict.fromkeys(row.engine for row in rows):
        if own := [row for row in rows if row.engine == engine and row.case in cases]:
            yield engine, own


def draw(found: Links) -> None:
    """Write the picture: time of a step over the link's bandwidth, measured and exposed."""
    figures = [
        Figure(
            title=f"{engine}, {count} devices on two hosts",
            caption="",
            x="bandwidth of the link (gbit/s)",
            y="time of a step (ms)",
            log="xy",
            series=[line for number, row in enumerate(rows) for line in _lines(row, found.links, number)],
            is_small=True,
        )
        for count, cases in (("two", ON_TWO), ("four", ON_FOUR))
        for engine, rows in _by_engine(found.rows, cases)
    ]
    save_figures(PICTURE, figures, title="")


def _lines(row: LinkRow, links: Sequence[Link], colour: int) -> list[Series]:
    x = [link.bytes_per_s * 8 / 1e9 for link in links]
    measured = [at(row, link).step_ms for link in links]
    formula = [row.rates[0].step_ms, *(exposed_ms(row, link) for link in links[1:])]
    return [
        Series(label=row.case, x=x, y=measured, colour=colour, mark="o"),
        Series(label="exposed, by the formula", x=x, y=formula, colour=colour, dash=":"),
    ]


def _cap(gbit: float) -> str:
    return f"{gbit:g} gbit/s" if gbit else "no cap"
